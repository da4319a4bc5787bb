"""Bars of a benchmark as an SVG file that reads on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = {"round_robin": "#9aa5b1", "least_load": "#5b8def", "affinity": "#e0a030", "kv_aware": "#2e9e6b"}
WIDTH, HEIGHT, LEFT, TOP, FLOOR, GAP = 720, 260, 50, 40, 215, 24


def draw(
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    unit: str,
    file: Path,
    colours: Mapping[str, str] = COLOURS,
) -> None:
    """One group of bars for each key, one bar for each name in it, in its colour; values in `unit`."""
    top = max(value for bars in groups.values() for value in bars.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]
    wide = (WIDTH - LEFT) / len(groups)
    for number, (name, bars) in enumerate(groups.items()):
        begin = LEFT + number * wide
        parts += _bars(begin, wide - GAP, bars, top, unit, colours)
        parts.append(f'<text x="{begin + (wide - GAP) / 2:.0f}" y="{FLOOR + 16}" text-anchor="middle">{name}</text>')
    parts += _legend(list(next(iter(groups.values()))), colours)
    file.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _bars(
    begin: float, wide: float, bars: Mapping[str, float], top: float, unit: str, colours: Mapping[str, str]
) -> list[str]:
    each = wide / len(bars)
    parts: list[str] = []
    for number, (policy, value) in enumerate(bars.items()):
        high = (FLOOR - TOP) * value / top
        at = begin + number * each
        parts.append(
            f'<rect x="{at:.1f}" y="{FLOOR - high:.1f}" width="{each - 4:.1f}" height="{high:.1f}" '
            f'fill="{colours[policy]}"/>'
        )
        parts.append(
            f'<text x="{at + each / 2 - 2:.1f}" y="{FLOOR - high - 4:.1f}" text-anchor="middle" font-size="10">'
            f"{value:.0f} {unit}</text>"
        )
    return parts


def _legend(policies: Sequence[str], colours: Mapping[str, str]) -> list[str]:
    return [
        f'<rect x="{LEFT + number * 130}" y="{FLOOR + 26}" width="10" height="10" fill="{colours[policy]}"/>'
        f'<text x="{LEFT + number * 130 + 15}" y="{FLOOR + 35}">{policy}</text>'
        for number, policy in enumerate(policies)
    ]
