"""Run tables sorted into bundles that differ in addresses only, so that a request is a few outer sums.

whole blocks     runs joined inside a slot; `dense`: block b + 1 follows block b on both sides, so that consecutive
                 blocks are one run too
cut blocks       runs at any phase, for the tokens that fill only part of a block on either side
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.run_table import RunTable


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Runs int64[R] by address in slot 0 at phase 0. In a whole block: `length` bytes, `count` times, `*_hop` bytes
    apart. In a cut block: `unit` bits for every token, `*_step` bits apart (see `run_table`)."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    src_stride: int
    dst_stride: int
    unit: int
    src_step: int
    dst_step: int
    dense: bool = field(default=False, kw_only=True)

    @property
    def solid(self) -> bool:
        """Consecutive tokens follow each other on both sides."""
        return self.unit == self.src_step == self.dst_step

    def __len__(self) -> int:
        return len(self.src)


def bundle(table: RunTable) -> tuple[Bundle, ...]:
    """Cut-block bundles of a table."""
    keys = (table.src_stride, table.dst_stride, table.unit, table.src_step, table.dst_step)
    return tuple(
        Bundle(table.src[rows], table.dst[rows], *(int(key[rows[0]]) for key in keys)) for rows in _alike(*keys)
    )


def bundle_whole(table: RunTable, tokens: int) -> tuple[Bundle, ...]:
    """Whole-block bundles: runs of `tokens` tokens, joined where both sides go on in the same slot and region. A joined
    run counts as one token of its length."""
    solid = table.solid
    bits = np.where(solid, table.unit * tokens, table.unit)
    known = (table.src_region >= 0) & (table.dst_region >= 0)
    order = np.lexsort((table.src, table.dst_stride, table.src_stride))
    src, dst, size = table.src[order], table.dst[order], bits[order] >> 3
    new = np.ones(len(order), np.bool_)
    new[1:] = ~((src[:-1] + size[:-1] == src[1:]) & (dst[:-1] + size[:-1] == dst[1:]))
    for column in (solid, table.src_stride, table.dst_stride, table.src_region, table.dst_region):
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    new |= ~(known & solid)[order]
    first = np.flatnonzero(new)
    joined = table.take(order[first])
    unit = np.add.reduceat(bits[order], first)
    solid, known = solid[order[first]], known[order[first]]
    steps = [np.where(solid, unit, step) for step in (joined.src_step, joined.dst_step)]
    dense = known & solid & (unit == joined.src_stride * 8) & (unit == joined.dst_stride * 8)
    keys = (joined.src_stride, joined.dst_stride, unit, *steps)
    return tuple(
        Bundle(joined.src[rows], joined.dst[rows], *(int(key[rows[0]]) for key in keys), dense=bool(dense[rows[0]]))
        for rows in _alike(*keys, dense)
    )


def _alike(*keys: NDArray[np.int64] | NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Rows with equal keys, together; their order among each other is kept."""
    order = np.lexsort(keys)
    if not len(order):
        return []
    new = np.zeros(len(order), np.bool_)
    for key in keys:
        ordered = key[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    return np.split(order, np.flatnonzero(new))
