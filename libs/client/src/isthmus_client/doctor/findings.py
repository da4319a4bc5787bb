"""What a check says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rich.table import Table


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it (empty when nothing is to be done)."""

    check: str
    level: Level
    text: str
    remedy: str = ""


_STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.BROKEN: "bold red"}


def render_findings(found: Sequence[Finding]) -> Table:
    """One row each, the worst first."""
    table = Table(show_edge=False)
    for name in ("check", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    order = [Level.BROKEN, Level.NOTE, Level.OK]
    for one in sorted(found, key=lambda finding: order.index(finding.level)):
        table.add_row(one.check, f"[{_STYLES[one.level]}]{one.level.value}[/]", one.text, one.remedy)
    return table
