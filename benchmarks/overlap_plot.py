"""Timelines of many requests as an SVG file: one lane for each leg, by the record of the instance that had it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

COLOURS = {"queue": "#c9cfd6", "prefill": "#5b8def", "send": "#2e9e6b", "receive": "#e0a030", "decode": "#a06cc8"}
_WIDTH, _LEFT, _RIGHT, _TOP, _LANE, _FOOT = 860, 110, 20, 34, 22, 56


class Bar(NamedTuple):
    """Of a kind of COLOURS; in seconds."""

    kind: str
    begin: float
    end: float


class Lane(NamedTuple):
    """One leg of one request."""

    name: str
    bars: Sequence[Bar]


def write_overlap(path: Path, title: str, instances: Mapping[str, Sequence[Lane]]) -> None:
    """The lanes of each instance under its name; all times count from one moment."""
    lanes = [lane for own in instances.values() for lane in own]
    first = min(bar.begin for lane in lanes for bar in lane.bars)
    last = max(bar.end for lane in lanes for bar in lane.bars)
    height = _TOP + _LANE * (len(lanes) + len(instances)) + _FOOT
    scale = (_WIDTH - _LEFT - _RIGHT) / (last - first)
    floor = height - _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(0, int(last - first) + 1, 1 + int(last - first) // 15):
        at = _LEFT + tick * scale
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{floor}" stroke="#e4e7eb"/>')
        parts.append(f'<text x="{at:.1f}" y="{floor + 16}" text-anchor="middle">{tick} s</text>')
    top = _TOP
    for name, own in instances.items():
        parts.append(f'<text x="10" y="{top + 15}" font-weight="bold">{escape(name)}</text>')
        top += _LANE
        for lane in own:
            parts.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(lane.name)}</text>')
            # Sends last, in front of the chunks that are computed meanwhile.
            parts += [_bar(bar, first, scale, top) for bar in sorted(lane.bars, key=lambda bar: bar.kind == "send")]
            top += _LANE
    parts += _legend(height - 20)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _bar(bar: Bar, first: float, scale: float, top: int) -> str:
    begin, wide = _LEFT + (bar.begin - first) * scale, max(2.0, (bar.end - bar.begin) * scale)
    high = _LANE - 6
    # Neighbouring chunks of one prompt stay apart.
    edge = 'stroke="white" stroke-width="0.5"'
    if bar.kind == "send":
        top, high, edge = top + high // 2, high // 2, 'stroke="none"'
    return f'<rect x="{begin:.1f}" y="{top + 3}" width="{wide:.1f}" height="{high}" fill="{COLOURS[bar.kind]}" {edge}/>'


def _legend(top: int) -> list[str]:
    parts: list[str] = []
    for number, (kind, colour) in enumerate(COLOURS.items()):
        at = _LEFT + number * 110
        parts.append(f'<rect x="{at}" y="{top - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{at + 18}" y="{top}">{kind}</text>')
    return parts
