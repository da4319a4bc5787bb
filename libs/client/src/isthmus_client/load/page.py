"""The result as one page without scripts or links: options, figures, a distribution of every time; two runs in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import zip_longest

from isthmus_client.load.report import change_of, figures, text_of
from isthmus_client.load.saved import Run

_NOW, _BEFORE = "#1565c0", "#e65100"
_GOOD, _BAD = "#2e7d32", "#c62828"
_STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:60em}table{border-collapse:collapse}"
    "td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}td:first-child{text-align:left}"
    f"svg{{background:#fafafa;border:1px solid #ddd;margin:.5em 0}}.now{{color:{_NOW}}}.before{{color:{_BEFORE}}}"
    f".good{{color:{_GOOD}}}.bad{{color:{_BAD}}}"
)
# A plot ends a little beyond this share: single outliers would press the rest into one line.
_SHOWN = 0.99
# A distribution of so many steps looks like one of all values.
_MAX_POINTS = 1000


def html_report(title: str, run: Run, before: Run | None = None) -> str:
    """The page of a run; `before`: an earlier one beside it, its figures, the change, its curves in the same plots."""
    name, then = escape(title), {} if before is None else before.series()
    legend = '<p><b class="now">now</b>, <b class="before">before</b></p>' if before is not None else ""
    plots = "".join(
        f"<h2>{escape(label)}</h2>{cumulative_svg(values, then.get(label, ()))}"
        for label, values in run.series().items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><style>{_STYLE}</style><h1>{name}</h1>"
        f"{legend}<h2>Options</h2>{_options(run, before)}<h2>Figures</h2>{_figures(run, before)}"
        f"<p>The plots: share of all (up) that took at most so long (right).</p>{plots}\n"
    )


def _table(rows: Iterable[Sequence[str]], before: Run | None, *more: str) -> str:
    """`rows` hold HTML."""
    titles = ["", "now"] if before is None else ["", "now", "before", *more]
    head = "".join(f"<th>{title}" for title in titles)
    return f"<table><tr>{head}{''.join('<tr>' + ''.join(f'<td>{cell}' for cell in row) for row in rows)}</table>"


def _options(run: Run, before: Run | None) -> str:
    old: Mapping[str, object] = {} if before is None else before.options
    names = list(dict.fromkeys([*run.options, *old]))
    rows = [[escape(name), escape(str(run.options.get(name, "")))] for name in names]
    if before is not None:
        for name, row in zip(names, rows, strict=True):
            row.append(escape(str(old.get(name, ""))))
    return _table(rows, before)


def _figures(run: Run, before: Run | None) -> str:
    rows: list[list[str]] = []
    old = figures(before.summary) if before is not None else []
    for now, then in zip_longest(figures(run.summary), old):
        row = [escape(now.name), text_of(now)]
        if then is not None:
            text, better = change_of(now, then)
            kind = "" if better is None else ' class="good"' if better else ' class="bad"'
            row += [text_of(then), f"<span{kind}>{text}</span>"]
        rows.append(row)
    return _table(rows, before, "change")


def cumulative_svg(values: Sequence[float], before: Sequence[float] = (), width: int = 640, height: int = 200) -> str:
    """Share of `values` (up) that are at most so long (right, to the 99th percentile and a bit); `before` likewise, on
    the same axis. Seconds."""
    if not values and not before:
        return "<p>nothing to show</p>"
    longest = max(_longest(values), _longest(before)) * 1.1 or 1e-9
    lines = "".join(
        f'<polyline points="0,{height} {_curve(some, longest, width, height)}" fill="none" stroke="{color}" '
        'stroke-width="2"/>'
        for some, color in ((before, _BEFORE), (values, _NOW))
        if some
    )
    place = f'y="{height - 4}" text-anchor="end" font-size="11"'
    marks = "".join(
        f'<text x="{share * width - 4:.0f}" {place}>{longest * share * 1e3:.3g} ms</text>'
        for share in (0.25, 0.5, 0.75, 1.0)
    )
    half = height / 2
    middle = f'<path d="M0 {half:g}H{width}" stroke="#ddd"/><text x="4" y="{half - 4:g}" font-size="11">50 %</text>'
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{middle}{lines}{marks}</svg>'


def _longest(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * _SHOWN))] if values else 0.0


def _curve(values: Sequence[float], longest: float, width: int, height: int) -> str:
    ordered = sorted(values)
    count = len(ordered)
    picked = (
        range(count) if count <= _MAX_POINTS else [step * (count - 1) // _MAX_POINTS for step in range(_MAX_POINTS + 1)]
    )
    return " ".join(
        f"{min(ordered[index] / longest, 1) * width:.1f},{height - (index + 1) / count * height:.1f}"
        for index in picked
    )
