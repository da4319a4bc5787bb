"""The result for people: a table in the terminal, two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

# Changes below it are what two runs of the same thing differ by.
_NOISE = 0.02
_RATES = (
    ("requests_per_s", "requests/s", True),
    ("output_tokens_per_s", "output tokens/s", True),
    ("prompt_tokens_per_s", "prompt tokens/s", True),
    ("goodput", "goodput, requests/s", True),
    ("attainment", "SLO attainment", True),
    ("failed", "failed requests", False),
)
_TIMES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "between tokens"), ("latency", "whole answer"))


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a summary. `more`: more is better; `is_time`: in seconds."""

    name: str
    value: float
    more: bool
    is_time: bool


def figures(summary: Mapping[str, Any]) -> list[Figure]:
    """The numbers of a summary in the order in which they are shown."""
    rows = [Figure(label, float(summary[key]), more, is_time=False) for key, label, more in _RATES]
    for key, label in _TIMES:
        rows += [
            Figure(f"{label} {share}", float(value), more=False, is_time=True) for share, value in summary[key].items()
        ]
    return rows


def text_of(figure: Figure) -> str:
    """As people read it."""
    value = figure.value
    return f"{value * 1e3:.2f} ms" if figure.is_time else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def change_of(now: Figure, before: Figure) -> tuple[str, bool | None]:
    """How much it has changed, and whether that is for the better; None: it is too little to say."""
    if before.value == 0:
        return "" if now.value == 0 else "new", None
    share = now.value / before.value - 1
    return f"{share:+.1%}", None if abs(share) < _NOISE else (share > 0) == now.more


def render_summary(summary: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """Every figure; beside an earlier run also its figures and the change."""
    table = Table(show_edge=False)
    table.add_column("")
    table.add_column("now", justify="right")
    if before is not None:
        table.add_column("before", justify="right")
        table.add_column("change", justify="right")
    old = {figure.name: figure for figure in figures(before)} if before is not None else {}
    for figure in figures(summary):
        cells = [figure.name, text_of(figure)]
        if figure.name in old:
            text, better = change_of(figure, old[figure.name])
            style = "" if better is None else "green" if better else "red"
            cells += [text_of(old[figure.name]), f"[{style}]{text}[/]" if style else text]
        table.add_row(*cells)
    return table
