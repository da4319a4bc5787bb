"""Runs of bytes of one token, symbolic: what a mapper makes of a pair of buffers.

    source address       = src + block * src_stride + phase * src_step / 8        phase: tokens before it in its block
    destination address  = dst + block * dst_stride + phase * dst_step / 8
    bytes                = unit / 8 for each token; tokens that follow each other on both sides are one run
                           (unit = src_step = dst_step)

`unit` and the steps are bits, so that four-bit elements stay exact; addresses are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class UnalignedSlice(PlanError):
    """A cut would fall inside a byte. `mine` and `yours` are the sizes in words."""

    def __init__(self, mine: str, yours: str) -> None:
        super().__init__(f"a head slice is not made of whole bytes: source {mine}, destination {yours}")
        self.mine = mine
        self.yours = yours


@dataclass(frozen=True, slots=True, eq=False)
class RunTable:
    """Struct of arrays, int64[R] each. `buffer`: number of the destination buffer in packing order. `token_major`: 1
    where the destination buffer puts the runs of one token side by side. `*_region`: the registered region that holds
    the buffer of every slot, -1 when slots lie in several."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    src_stride: NDArray[np.int64]
    dst_stride: NDArray[np.int64]
    unit: NDArray[np.int64]
    src_step: NDArray[np.int64]
    dst_step: NDArray[np.int64]
    buffer: NDArray[np.int64]
    token_major: NDArray[np.int64]
    src_region: NDArray[np.int64]
    dst_region: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.src)

    def take(self, index: NDArray[np.int64]) -> RunTable:
        """The runs of these numbers."""
        return RunTable(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def solid(self) -> NDArray[np.bool_]:
        """Where consecutive tokens follow each other on both sides."""
        return (self.unit == self.src_step) & (self.unit == self.dst_step)

    def aligned(self, grain: int) -> bool:
        """True when every cut at a multiple of `grain` tokens falls between bytes."""
        bits = np.where(self.solid, self.unit * grain, self.unit | self.src_step | self.dst_step)
        return not bool((bits % 8).any())


def join_units(table: RunTable) -> RunTable:
    """Runs of a slot that lie side by side on both sides become one."""
    table = table.take(np.lexsort((table.dst, table.buffer)))
    bytes_ = table.unit >> 3
    new = np.ones(len(table), np.bool_)
    new[1:] = (
        (table.buffer[1:] != table.buffer[:-1])
        | (table.src[:-1] + bytes_[:-1] != table.src[1:])
        | (table.dst[:-1] + bytes_[:-1] != table.dst[1:])
    )
    first = np.flatnonzero(new)
    unit = np.add.reduceat(table.unit, first)
    return replace(table.take(first), unit=unit, src_step=unit, dst_step=unit)


def concatenate(tables: Sequence[RunTable]) -> RunTable:
    """All runs, sorted by destination buffer and address."""
    joined = RunTable(*(np.concatenate([getattr(one, field.name) for one in tables]) for field in fields(RunTable)))
    return joined.take(np.lexsort((joined.dst, joined.buffer)))
