"""Caches of two ranks whose layouts differ in every way that is met in practice, sized to a number of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_BYTES = 256  # head dimension 128 in bfloat16


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a case. `order`: slot (all layers of a block together) or layer."""

    kind: MapperKind = MapperKind.HND
    order: str = "layer"
    heads: int = 8
    first_head: int = 0
    block: int = 32


@dataclass(frozen=True, slots=True)
class Case:
    """`moved_heads`: how many heads travel."""

    name: str
    src: Side
    dst: Side
    moved_heads: int = 8
    permuted: bool = True

    def tokens(self, nbytes: int, layers: int) -> int:
        """Tokens of which about `nbytes` travel, in whole blocks."""
        grain = max(self.src.block, self.dst.block)
        return max(1, nbytes // (2 * layers * self.moved_heads * HEAD_BYTES * grain)) * grain


HND, NHD = MapperKind.HND, MapperKind.NHD
CASES = (
    Case("contiguous", Side(), Side(), permuted=False),
    Case("permuted, slot-major", Side(order="slot"), Side(order="slot")),
    Case("permuted, layer-major, TP8 shard", Side(heads=1), Side(heads=1), 1),
    Case("HND, TP2 to TP1", Side(heads=4), Side(heads=8), 4),
    Case("HND, TP1 to TP2", Side(heads=8), Side(heads=4), 4),
    Case("NHD, TP2 to TP1", Side(NHD, heads=8), Side(NHD, heads=16), 8),
    Case("HND to NHD", Side(HND), Side(NHD)),
    Case("blocks of 16 to 64", Side(block=16), Side(block=64)),
)


def table(side: Side, base: int, blocks: int, layers: int, memory: tuple[MemoryKind, int]) -> tuple[PageTable, int]:
    """Page table of `blocks` blocks at address `base`, and its bytes."""
    buffer = side.block * side.heads * HEAD_BYTES
    total = buffer * layers * 2 * blocks
    heads = HeadInterval(side.first_head, side.first_head + side.heads)
    sizes, ids = np.full(layers, buffer, np.uint32), np.arange(layers, dtype=np.uint32)
    if side.order == "slot":
        pools = (PhysicalPool(base, buffer * layers * 2, blocks, buffer * layers * 2, 0),)
        offsets = [np.arange(layers, dtype=np.uint64) * 2 * buffer + kv * buffer for kv in (0, 1)]
    else:
        pools = tuple(PhysicalPool(base + kv * total // 2, buffer, blocks) for kv in (0, 1))
        offsets = [np.zeros(layers, np.uint64)] * 2
    views = tuple(
        PoolView(
            frozenset({name}),
            side.kind,
            min(kv, len(pools) - 1),
            BufferEntries(ids, offsets[kv].astype(np.uint64), sizes),
            heads,
        )
        for kv, name in enumerate("kv")
    )
    group = AttentionGroup(tuple(range(layers)), side.block, views)
    kind, device = memory
    return PageTable((RegisteredRegion(base, total, kind, device),), pools, (group,)), total


def table_bytes(side: Side, blocks: int, layers: int) -> int:
    """What `table` will need."""
    return side.block * side.heads * HEAD_BYTES * layers * 2 * blocks


def block_lists(case: Case, tokens: int, seed: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Blocks of both sides for a prompt, in no order unless the case is contiguous."""
    rng, lists = np.random.default_rng(seed), list["NDArray[np.int32]"]()
    for side in (case.src, case.dst):
        count = -(-tokens // side.block)
        lists.append((rng.permutation(count) if case.permuted else np.arange(count)).astype(np.int32))
    return lists[0], lists[1]
