"""Equal layouts: every buffer moves whole, and neighbours move together.

    source slot        |K L0|V L0|K L1|V L1|          destination slot   |K L0|V L0|K L1|V L1|
                       └────────one run────┘  ─────▶                     └────────one run────┘

    source slot        |K L0|V L0|K L1|V L1|          destination pools  |K L0| … |K L1| …    |V L0| … |V L1| …
                        run0 run1 run2 run3   ─────▶                      run0     run2        run1     run3

Invariant: buffer i has the same bytes in the same order on both sides, so a run may be cut or merged anywhere as long
as source and destination advance together. Two buffers become one run only where the second follows the first without a
gap on BOTH sides. The addresses are those of slot 0; slot s adds s times the slot stride of each side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SlotRuns:
    """Runs of one block. int64[R] each: addresses in slot 0, bytes, and what one slot adds on either side."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    length: NDArray[np.int64]
    src_stride: NDArray[np.int64]
    dst_stride: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.src)


def concatenate(parts: list[SlotRuns]) -> SlotRuns:
    """All runs of several pairs of views."""
    names = ("src", "dst", "length", "src_stride", "dst_stride")
    return SlotRuns(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def merge_slot_runs(runs: SlotRuns) -> SlotRuns:
    """Joins neighbours inside a slot. Only legal when each side's pools lie in one registered region each."""
    order = np.lexsort((runs.src, runs.dst_stride, runs.src_stride))
    src, dst, length = runs.src[order], runs.dst[order], runs.length[order]
    src_stride, dst_stride = runs.src_stride[order], runs.dst_stride[order]
    joined = (
        (src[:-1] + length[:-1] == src[1:])
        & (dst[:-1] + length[:-1] == dst[1:])
        & (src_stride[:-1] == src_stride[1:])
        & (dst_stride[:-1] == dst_stride[1:])
    )
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    total = np.add.reduceat(length, heads)
    return SlotRuns(src[heads], dst[heads], total, src_stride[heads], dst_stride[heads])
