"""What the schedules have met, against what they must meet.

Every transition of every table named …TRANSITIONS in kvtransfer, every fault in every phase, every two faults that hit
the same attempt.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest

import kvtransfer

from .attempt import Phase
from .script import FaultKind


@dataclass
class Coverage:
    """Sets that can be merged. `transitions` are (module, state, event)."""

    transitions: set[tuple[str, str, str]] = field(default_factory=set[tuple[str, str, str]])
    phases: set[tuple[FaultKind, Phase]] = field(default_factory=set[tuple[FaultKind, Phase]])
    pairs: set[tuple[FaultKind, FaultKind]] = field(default_factory=set[tuple[FaultKind, FaultKind]])

    def merge(self, other: Coverage) -> None:
        """Adds what another process has met."""
        self.transitions |= other.transitions
        self.phases |= other.phases
        self.pairs |= other.pairs

    def missing(self) -> list[str]:
        """What has not been met, readable."""
        lacking = [
            f"transition {where}: {state} + {event}" for where, state, event in every_transition() - self.transitions
        ]
        lacking += [
            f"{kind.value} while {phase.value}"
            for kind in FaultKind
            for phase in Phase
            if (kind, phase) not in self.phases
        ]
        kinds = sorted(FaultKind, key=lambda kind: kind.name)
        lacking += [
            f"{a.value} together with {b.value}"
            for a, b in combinations_with_replacement(kinds, 2)
            if (a, b) not in self.pairs
        ]
        return sorted(lacking)


class _Recording(dict[Any, Any]):
    """A transition table that says which of its entries are used."""

    def __init__(self, table: dict[Any, Any], where: str, used: set[tuple[str, str, str]]) -> None:
        super().__init__(table)
        self._where, self._used = where, used

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __getitem__(self, key: Any) -> Any:
        state, event = key
        self._used.add((self._where, state.name, event.name))
        return super().__getitem__(key)


def _tables() -> dict[tuple[str, str], dict[Any, Any]]:
    """Every table of the package, by the module that defines it and its name there."""
    found: dict[tuple[str, str], dict[Any, Any]] = {}
    root = Path(kvtransfer.__path__[0])
    for path in sorted(root.rglob("*.py")):
        for name in re.findall(r"^(\w*TRANSITIONS)\b.* = ", path.read_text(), re.MULTILINE):
            module = ".".join(("kvtransfer", *path.relative_to(root).with_suffix("").parts))
            found[module, name] = getattr(importlib.import_module(module), name)
    return found


def every_transition() -> set[tuple[str, str, str]]:
    """(module, state, event) of every table."""
    return {(module, state.name, event.name) for (module, _), table in _tables().items() for state, event in table}


@contextmanager
def recorded_transitions(coverage: Coverage) -> Generator[None]:
    """While open, every transition that is taken is added to `coverage`."""
    with pytest.MonkeyPatch.context() as patch:
        for (where, name), table in _tables().items():
            recording = _Recording(table, where, coverage.transitions)
            for imported, module in list(sys.modules.items()):
                if imported.startswith("kvtransfer.") and vars(module).get(name) is table:
                    patch.setattr(module, name, recording)
        yield
