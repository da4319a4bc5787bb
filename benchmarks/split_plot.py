"""A plot of latencies as SVG: share of the gaps above a length, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 400, 70, 60, 40
_COLOURS = ("#1f6fb4", "#c23b22", "#3a8f3a")


def write_plot(path: Path, gaps: Mapping[str, Sequence[float]], title: str) -> None:
    """One line for each name; gaps in seconds."""
    lowest = min(min(values) for values in gaps.values()) * 1e3
    highest = max(max(values) for values in gaps.values()) * 1e3
    fewest = min(1 / len(values) for values in gaps.values())
    low, high, floor = np.floor(np.log10(lowest)), np.ceil(np.log10(highest)), np.floor(np.log10(fewest))

    def x(milliseconds: float) -> float:
        return _LEFT + (np.log10(milliseconds) - low) / (high - low) * (_WIDTH - _LEFT - 20)

    def y(share: float) -> float:
        return _TOP + np.log10(share) / floor * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{title}</text>',
    ]
    for power in range(int(low), int(high) + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
        label = f"{10.0**power:g} ms"
        parts.append(f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{label}</text>')
    for power in range(0, int(floor) - 1, -1):
        at = y(10.0**power)
        parts.append(f'<line x1="{_LEFT}" y1="{at:.1f}" x2="{_WIDTH - 20}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:.3g}</text>')
    for (name, values), colour in zip(gaps.items(), _COLOURS, strict=False):
        ordered = np.sort(np.array(values)) * 1e3
        shares = 1 - np.arange(len(ordered)) / len(ordered)
        points = " ".join(f"{x(gap):.1f},{y(share):.1f}" for gap, share in zip(ordered, shares, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        last = float(ordered[-1])
        parts.append(
            f'<text x="{x(last) - 6:.1f}" y="{y(fewest) - 6:.1f}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 14}" text-anchor="middle">gap</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 4}" text-anchor="middle">share above</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")
