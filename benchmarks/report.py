"""What every benchmark prints and writes: one row per figure, with its baseline of the same run.

    name | value unit | baseline | ratio | aim | ok

`ratio` is how many times better the value is than the baseline; `ok` is None where no aim is set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `baseline` in the same unit; `aim` in words, for people."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    aim: str = ""
    ok: bool | None = None


def at_least(name: str, value: float, unit: str, baseline: float, least: float) -> Row:
    """More is better: value / baseline should reach `least`."""
    ratio = value / baseline
    return Row(name, value, unit, baseline, ratio, f">= {least:g} x baseline", ratio >= least)


def at_most(name: str, value: float, unit: str, baseline: float, most: float) -> Row:
    """Less is better: value / baseline should stay within `most`. The ratio shown is value / baseline."""
    ratio = value / baseline
    return Row(name, value, unit, baseline, ratio, f"<= {most:g} x baseline", ratio <= most)


def below(name: str, value: float, unit: str, limit: float) -> Row:
    """An absolute limit."""
    return Row(name, value, unit, None, None, f"< {limit:g} {unit}", value < limit)


def figure(name: str, value: float, unit: str) -> Row:
    """A figure without an aim."""
    return Row(name, value, unit)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the two options that every benchmark takes."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    return parser


def interleaved(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of each case over `rounds` rounds; a round runs every case once, so that slow moments hit all alike."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            samples[name].append(run())
    return {name: statistics.median(values) for name, values in samples.items()}


def show(title: str, rows: Sequence[Row], json_file: Path | None = None) -> None:
    """Print the rows, and write them where asked."""
    # Here, so that rows can be made where rich is missing, as on a bare GPU machine.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in ("name", "value", "unit", "baseline", "ratio", "aim", "ok"):
        table.add_column(column, justify="left" if column in ("name", "unit", "aim") else "right")
    for row in rows:
        ok = "" if row.ok is None else ("yes" if row.ok else "NO")
        table.add_row(row.name, _number(row.value), row.unit, _number(row.baseline), _number(row.ratio), row.aim, ok)
    Console(width=None if Console().is_terminal else 160).print(table)
    if json_file is not None:
        write(rows, json_file)


def write(rows: Sequence[Row], json_file: Path) -> None:
    """The rows as a list of objects."""
    json_file.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
