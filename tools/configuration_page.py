"""Writes docs/configuration.md from the schema: `python tools/configuration_page.py`. A contract test compares them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from isthmus_core.config import IsthmusConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """\
# Configuration

Every process takes `--config FILE` (YAML) and any number of `--set section.key=value`. All processes may share one
file: each uses its own sections. Unknown keys are refused with the nearest known name. Times are in seconds, sizes in
bytes.

`isthmus up --config FILE` lays what it decides itself (addresses, roles, the model) over the file.

This page is made from the schema (`tools/configuration_page.py`).
"""


def _default(field: FieldInfo) -> str:
    if field.default_factory in (dict, list):
        value: Any = {} if field.default_factory is dict else []
    else:
        value = field.get_default(call_default_factory=False)
    return "" if value is None else f"`{value}`"


def _section(name: str, model: type[BaseModel]) -> Iterable[str]:
    yield f"\n## {name}\n"
    yield f"{(model.__doc__ or '').strip().splitlines()[0]}\n"
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    below: list[tuple[str, type[BaseModel]]] = []
    for key, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            below.append((f"{name}.{key}", kind))
        else:
            meaning = (field.description or "").replace("|", "\\|")
            yield f"| `{name}.{key}` | {_default(field)} | {meaning} |"
    for inner, kind in below:
        yield from _section(inner, kind)


def render_page() -> str:
    """The page's text."""
    lines: list[str] = []
    for name, field in IsthmusConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += _section(name, kind)
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page())
