"""docs/timeouts.md names every timeout of the configuration with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from isthmus_core.config import IsthmusConfig

PAGE = Path(__file__).parents[2] / "docs" / "timeouts.md"
# In seconds, but nothing happens when they are over.
NO_TIMEOUTS = ("_per_s", "push_interval_s")


def seconds(model: type[BaseModel] = IsthmusConfig, prefix: str = "") -> dict[str, Any]:
    """Every key that is a number of seconds, with its default."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= seconds(kind, f"{prefix}{name}.")
        elif name.endswith("_s") and not name.endswith(NO_TIMEOUTS):
            found[prefix + name] = field.default
    return found


def test_the_page_has_every_timeout_and_its_default():
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    shown = {key: value.strip() for key, value in rows}
    known = seconds()
    assert sorted(shown) == sorted(known)
    for key, value in known.items():
        if value is not None:
            assert float(shown[key]) == value, key
