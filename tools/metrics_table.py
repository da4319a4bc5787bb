"""Writes the table of metrics in docs/observability.md from the catalogue.

python tools/metrics_table.py
"""

from __future__ import annotations

from pathlib import Path

from isthmus_core.metrics.catalogue import CATALOGUE
from isthmus_core.metrics.definitions import Definition, Kind

PAGE = Path(__file__).parents[1] / "docs" / "observability.md"
BEGIN, END = "<!-- metrics: tools/metrics_table.py -->", "<!-- end of metrics -->"


def _labels(one: Definition) -> str:
    parts = [
        f"`{label.name}` ({', '.join(label.values)})" if label.values else f"`{label.name}` (at most {label.limit})"
        for label in one.labels
    ]
    return "; ".join(parts)


def _kind(one: Definition) -> str:
    return "counter" if one.kind is Kind.OBSERVED_COUNTER else one.kind.value


def render_table() -> str:
    """All metrics, by service."""
    lines = ["| metric | kind | where | labels | what |", "|---|---|---|---|---|"]
    for one in CATALOGUE:
        where = "all" if len(one.services) == 3 else ", ".join(one.services)
        lines.append(f"| `{one.prometheus}` | {_kind(one)} | {where} | {_labels(one)} | {one.help} |")
    return "\n".join(lines)


def render_page(text: str) -> str:
    """The page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
