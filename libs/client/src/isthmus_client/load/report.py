"""The result for people: a table in the terminal, a page with plots, two runs side by side."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_RATES = (
    ("requests_per_s", "requests/s", True),
    ("output_tokens_per_s", "output tokens/s", True),
    ("prompt_tokens_per_s", "prompt tokens/s", True),
    ("goodput", "goodput, requests/s", True),
    ("attainment", "SLO attainment", True),
    ("failed", "failed requests", False),
)
_TIMES = (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "between tokens"), ("latency", "whole answer"))


def _rows(summary: Mapping[str, Any]) -> list[tuple[str, float, bool, bool]]:
    """(name, value, more is better, is a time)."""
    rows = [(label, float(summary[key]), more, False) for key, label, more in _RATES]
    for key, label in _TIMES:
        rows += [(f"{label} {share}", float(value), False, True) for share, value in summary[key].items()]
    return rows


def _text(value: float, is_time: bool) -> str:
    return f"{value * 1e3:.2f} ms" if is_time else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def render_summary(summary: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Table:
    """Every figure; beside an earlier run also its figures and the change."""
    table = Table(show_edge=False)
    table.add_column("")
    table.add_column("now", justify="right")
    if before is not None:
        table.add_column("before", justify="right")
        table.add_column("change", justify="right")
    old = {name: value for name, value, _, _ in _rows(before)} if before is not None else {}
    for name, value, more, is_time in _rows(summary):
        cells = [name, _text(value, is_time)]
        if before is not None:
            earlier = old[name]
            cells += [_text(earlier, is_time), _change(value, earlier, more)]
        table.add_row(*cells)
    return table


def _change(value: float, before: float, more: bool) -> str:
    if before == 0:
        return "" if value == 0 else "new"
    share = value / before - 1
    style = "" if abs(share) < 0.02 else "green" if (share > 0) == more else "red"
    text = f"{share:+.1%}"
    return f"[{style}]{text}[/]" if style else text


_STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:60em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}td:first-child{text-align:left}"
    "svg{background:#fafafa;border:1px solid #ddd;margin:.5em 0}"
)


def html_report(
    title: str, options: Mapping[str, Any], summary: Mapping[str, Any], series: Mapping[str, Sequence[float]]
) -> str:
    """One page without scripts or links: the options, the figures, a distribution for each series (in seconds)."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}<td>{_text(value, is_time)}" for name, value, _, is_time in _rows(summary)
    )
    asked = "".join(f"<tr><td>{html.escape(key)}<td>{html.escape(str(value))}" for key, value in options.items())
    plots = "".join(f"<h2>{html.escape(name)}</h2>{cumulative_svg(values)}" for name, values in series.items())
    name = html.escape(title)
    return (
        f"<!doctype html><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style><h1>{name}</h1>"
        f"<h2>Options</h2><table>{asked}</table><h2>Figures</h2><table>{rows}</table>{plots}\n"
    )


def cumulative_svg(values: Sequence[float], width: int = 640, height: int = 200) -> str:
    """Share of requests (up) that took at most so long (right, to the 99th percentile and a bit)."""
    if not values:
        return "<p>nothing to show</p>"
    ordered = sorted(values)
    longest = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1.1 or 1e-9
    points = " ".join(
        f"{min(value / longest, 1) * width:.1f},{height - (index + 1) / len(ordered) * height:.1f}"
        for index, value in enumerate(ordered)
    )
    place = f'y="{height - 4}" text-anchor="end" font-size="11"'
    marks = "".join(
        f'<text x="{share * width - 4:.0f}" {place}>{longest * share * 1e3:.3g} ms</text>'
        for share in (0.25, 0.5, 0.75, 1.0)
    )
    line = f'<polyline points="0,{height} {points}" fill="none" stroke="#1565c0" stroke-width="2"/>'
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{line}{marks}</svg>'
