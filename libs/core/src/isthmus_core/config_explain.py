"""What a configuration comes to: every key, its value, where it comes from, what it means."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel

from isthmus_core.config import IsthmusConfig, load_config, set_key

Source = Literal["default", "file", "--set"]


@dataclass(frozen=True, slots=True)
class ExplainedKey:
    """One setting in force. `value` as JSON, which is YAML too."""

    key: str
    value: str
    source: Source
    meaning: str


def explain_config(path: Path | None, overrides: Sequence[str] = ()) -> list[ExplainedKey]:
    """Every key of the configuration in order of the schema. Raises ConfigError, as `load_config` does."""
    config = load_config(path, overrides)
    written: dict[str, Any] = {} if path is None else yaml.safe_load(path.read_text()) or {}
    above: dict[str, Any] = {}
    for override in overrides:
        set_key(above, override)
    in_file, in_set = set(_keys(written)), set(_keys(above))

    def source(key: str) -> Source:
        return "--set" if _given(key, in_set) else "file" if _given(key, in_file) else "default"

    return [
        ExplainedKey(key, _text(value), source(key), meaning)
        for key, value, meaning in _walk(config, IsthmusConfig, "")
    ]


def _given(key: str, given: set[str]) -> bool:
    """A mapping may be given whole, or key by key."""
    return key in given or any(one.startswith(f"{key}.") for one in given)


def _keys(data: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _keys(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _walk(section: BaseModel, schema: type[BaseModel], prefix: str) -> Iterable[tuple[str, Any, str]]:
    for name, field in schema.model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _walk(value, type(value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value, field.description or ""


def _text(value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else value
    if isinstance(plain, tuple):
        plain = list(cast("tuple[Any, ...]", plain))
    return json.dumps(plain)
