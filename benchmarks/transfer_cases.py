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
    RecurrentGroup,
    RegisteredRegion,
    Section,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEAD_BYTES = 256  # head dimension 128 in bfloat16
SHARED = 2  # units of a row of a state that every rank has, twice: B and C of Mamba


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a case. `order`: slot (all layers of a block together) or layer. `rows` of a recurrent state, of
    which there is one, however long the prompt: `block` tokens at most."""

    kind: MapperKind = MapperKind.HND
    order: str = "layer"
    heads: int = 8
    first_head: int = 0
    block: int = 32
    rows: int = 0

    @property
    def buffer(self) -> int:
        """Bytes of a block of one layer and one of K and V, or of a layer's state."""
        return (self.rows * (self.heads + 2 * SHARED) if self.rows else self.block * self.heads) * HEAD_BYTES


@dataclass(frozen=True, slots=True)
class Case:
    """`moved_heads`: how many heads travel. `layers` of the model on both ranks."""

    name: str
    src: Side
    dst: Side
    moved_heads: int = 8
    permuted: bool = True
    layers: int = 16

    def tokens(self, nbytes: int) -> int:
        """Tokens of which about `nbytes` travel, in whole blocks. A state is what it is."""
        if self.src.rows:
            return self.src.block
        grain = max(self.src.block, self.dst.block)
        return max(1, nbytes // (2 * self.layers * self.moved_heads * HEAD_BYTES * grain)) * grain


HND, NHD, SECTIONED = MapperKind.HND, MapperKind.NHD, MapperKind.SECTIONED
CASES = (
    Case("contiguous", Side(order="slot"), Side(order="slot"), permuted=False),
    Case("contiguous in each layer", Side(), Side(), permuted=False),
    Case("permuted, slot-major", Side(order="slot"), Side(order="slot")),
    Case("permuted, layer-major, TP8 shard", Side(heads=1), Side(heads=1), 1),
    Case("HND, TP2 to TP1", Side(heads=4), Side(heads=8), 4),
    Case("HND, TP1 to TP2", Side(heads=8), Side(heads=4), 4),
    Case("NHD, TP2 to TP1", Side(NHD, heads=8), Side(NHD, heads=16), 8),
    Case("NHD, TP8 to TP4", Side(NHD, heads=2), Side(NHD, heads=4), 2),
    Case("HND to NHD", Side(HND), Side(NHD)),
    Case("Mamba state, TP2 to TP1", Side(SECTIONED, heads=4, rows=512), Side(SECTIONED, heads=8, rows=512)),
    Case("blocks of 16 to 64", Side(block=16), Side(block=64)),
)


def table(side: Side, base: int, blocks: int, layers: int, memory: tuple[MemoryKind, int]) -> tuple[PageTable, int]:
    """Page table of `blocks` blocks at address `base`, and its bytes."""
    kind, device = memory
    total, buffer = table_bytes(side, blocks, layers), side.buffer
    region = RegisteredRegion(base, total, kind, device)
    if side.rows:
        pool = PhysicalPool(base, buffer * layers, blocks, buffer * layers, 0)
        return PageTable((region,), (pool,), (_state(side, layers),)), total
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
    return PageTable((region,), pools, (group,)), total


def _state(side: Side, layers: int) -> RecurrentGroup:
    """Rows of three sections: x is cut over the ranks, every rank has B and C."""
    x = Section("x", side.first_head, side.first_head + side.heads, HEAD_BYTES)
    shared = (Section(name, 0, SHARED, HEAD_BYTES) for name in "BC")
    offsets, sizes = np.arange(layers, dtype=np.uint64) * side.buffer, np.full(layers, side.buffer, np.uint32)
    entries = BufferEntries(np.arange(layers, dtype=np.uint32), offsets.astype(np.uint64), sizes)
    view = PoolView(frozenset({"state"}), side.kind, 0, entries, sections=(x, *shared), rows=side.rows)
    return RecurrentGroup(tuple(range(layers)), (view,))


def table_bytes(side: Side, blocks: int, layers: int) -> int:
    """What `table` will need."""
    return side.buffer * layers * blocks * (1 if side.rows else 2)


def block_lists(case: Case, tokens: int, seed: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Blocks of both sides for a prompt, in no order unless the case is contiguous."""
    rng, lists = np.random.default_rng(seed), list["NDArray[np.int32]"]()
    for side in (case.src, case.dst):
        count = -(-tokens // side.block)
        lists.append((rng.permutation(count) if case.permuted else np.arange(count)).astype(np.int32))
    return lists[0], lists[1]
