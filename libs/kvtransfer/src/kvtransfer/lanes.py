"""K and V of a token side by side on both sides: their two pairs of buffers are one again.

    both sides   | k v | k v | k v | …     pair 0 moves the k, pair 1 the v, a pitch of k + v bytes apart
                 └──────one run──────┘     together they move everything

Invariant: what is joined has the same units in the same order, lane after lane from the same lane on, up to the pitch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.buffer_pairs import BufferPairs

_SAME = ("lo", "hi", "stride", "tokens", "kind", "group", "region", "pitch")


def join_lanes(pairs: BufferPairs) -> BufferPairs:
    """Lanes that fill their pitch on both sides become one pair without a pitch, in the place of the first."""
    src, dst = pairs.src, pairs.dst
    lanes = np.flatnonzero((src.pitch > 0) & (src.pitch == dst.pitch))
    if not len(lanes):
        return pairs
    columns = [getattr(side, name)[lanes] for side in (src, dst) for name in _SAME]
    columns += [pairs.lo[lanes], pairs.hi[lanes]]
    order = np.lexsort((src.address[lanes], *columns))
    rows = lanes[order]
    width = src.unit_bits[rows] >> 3
    follows = np.ones(len(rows) - 1, np.bool_)
    for side in (src, dst):
        follows &= side.address[rows[:-1]] + width[:-1] == side.address[rows[1:]]
    for column in columns:
        follows &= column[order][:-1] == column[order][1:]
    keep, size, pitch = np.ones(len(pairs), np.bool_), (src.size.copy(), dst.size.copy()), src.pitch.copy()
    layer = np.array(pairs.layer)
    for first, last in _full(follows, width, src.pitch[rows]):
        joined = rows[first : last + 1]
        for total, side in zip(size, (src, dst), strict=True):
            total[joined[0]] = side.size[joined].sum()
        pitch[joined[0]], layer[joined[0]] = 0, layer[joined].max()
        keep[joined[1:]] = False
    whole = replace(
        pairs,
        src=replace(src, size=size[0], pitch=pitch),
        dst=replace(dst, size=size[1], pitch=np.where(pitch, dst.pitch, 0)),
        layer=layer,
    )
    return whole.take(np.flatnonzero(keep))


def _full(follows: NDArray[np.bool_], width: NDArray[np.int64], pitch: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Chains of lanes, [first, last], that fill their pitch exactly."""
    chains: list[tuple[int, int]] = []
    first, filled = 0, 0
    for row, bytes_ in enumerate(width.tolist()):
        if row and (filled >= pitch[first] or not follows[row - 1]):
            first, filled = row, 0
        filled += bytes_
        if filled == pitch[first]:
            chains.append((first, row))
    return chains
