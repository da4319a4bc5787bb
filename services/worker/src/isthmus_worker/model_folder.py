"""What a model's folder must hold, and how the fetching of one talks to people."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from isthmus_core.errors import ConfigError


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def check_folder(path: Path) -> Path:
    """`path` as an absolute path. Raises ConfigError naming every needed file that is missing or not readable."""
    if not path.is_dir():
        raise ConfigError(f"model {path}: is a file; give the folder that holds config.json and the weights")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        missing += [name for name in _shards(index) if not (path / name).is_file()]
    elif not (path / "model.safetensors").is_file():
        missing.append("model.safetensors (or model.safetensors.index.json with its shards)")
    if missing:
        raise ConfigError(f"model {path}: lacks {', '.join(missing)}")
    closed = sorted(file.name for file in path.iterdir() if file.is_file() and not os.access(file, os.R_OK))
    if closed:
        raise ConfigError(f"model {path}: user {os.getuid()} may not read {', '.join(closed)}; chmod a+r")
    return path.resolve()


def _shards(index: Path) -> list[str]:
    try:
        content: Any = json.loads(index.read_text())
        return sorted({str(name) for name in cast("dict[str, Any]", content["weight_map"]).values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: is not a safetensors index with a weight_map") from error


def one_line(error: BaseException, limit: int = 300) -> str:
    """The text of an error for use inside a line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
