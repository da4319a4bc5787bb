"""Bugs to be found, one at a time: each replaces a piece of the machines by what somebody might have written.

They reach into private parts on purpose. One that no longer fits the code ends in AttributeError or TypeError, which is
not taken for having been found.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

Bug = Callable[[pytest.MonkeyPatch], None]
_BUGS: dict[str, Bug] = {}


def planted(bug: Bug) -> Bug:
    """Lists a bug by its name."""
    _BUGS[bug.__name__] = bug
    return bug


def every_bug() -> dict[str, Bug]:
    """Name and what plants it."""
    for module in ("planted_context", "planted_generation", "planted_bounce"):
        importlib.import_module(f"{__package__}.{module}")
    return dict(_BUGS)
