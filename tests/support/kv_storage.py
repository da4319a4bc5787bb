"""KV storage in plain host memory for tests, in several layouts, with an oracle that shares no code with the planner.

A buffer holds one block of one layer's K or V as [token][head][byte]. The oracle finds bytes by its own arithmetic.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import pairwise
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
from kvtransfer.rank_info import AgentDescriptor, InstanceInfo, InstanceRole, ModelFingerprint, RankInfo, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

GUARD = 64
LAYOUTS = ("slot_major", "slot_major_gaps", "slot_major_reversed", "layer_major", "one_view")
MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "F32")


@dataclass(frozen=True)
class Shape:
    """Sizes that two storages must share. `unit`: bytes of one token of one head."""

    layers: tuple[int, ...] = (0, 1, 2)
    heads: int = 2
    unit: int = 4
    tokens_per_block: int = 4

    @property
    def buffer(self) -> int:
        """Bytes of one buffer."""
        return self.tokens_per_block * self.heads * self.unit


@dataclass
class Storage:
    """Memory of one rank: guard bytes, the pools, guard bytes. `kind`: what its page table calls it."""

    shape: Shape
    layout: str
    blocks: int
    regions: int = 1
    kind: MemoryKind = MemoryKind.DRAM
    memory: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.full(GUARD + self.size + GUARD, 0xEE, np.uint8)

    @property
    def size(self) -> int:
        """Bytes of all pools."""
        return self.blocks * self.slot if self.layout != "layer_major" else self.pool * 2

    @property
    def slot(self) -> int:
        """Bytes from one slot to the next (slot-major layouts)."""
        buffers = 2 * len(self.shape.layers)
        gap = 24 if self.layout == "slot_major_gaps" else 0
        return buffers * (self.shape.buffer + gap) + gap

    @property
    def pool(self) -> int:
        """Bytes of the K (or V) pool of the layer-major layout."""
        return len(self.shape.layers) * self.blocks * self.shape.buffer

    def where(self, layer: int, kv: int, block: int) -> int:
        """Oracle: offset of a buffer from the start of the pools. `layer` counts within the group."""
        size, count = self.shape.buffer, len(self.shape.layers)
        if self.layout == "layer_major":
            return kv * self.pool + (layer * self.blocks + block) * size
        order = count - 1 - layer if self.layout == "slot_major_reversed" else layer
        gap = 24 if self.layout == "slot_major_gaps" else 0
        return block * self.slot + (order * 2 + kv) * (size + gap)

    @property
    def base(self) -> int:
        """Address of the pools."""
        return int(self.memory.ctypes.data) + GUARD

    def page_table(self, first_head: int = 0) -> PageTable:
        """The same storage as the planner sees it."""
        count, size = len(self.shape.layers), self.shape.buffer
        if self.layout == "layer_major":
            pools = (
                PhysicalPool(self.base, size, self.blocks),
                PhysicalPool(self.base + self.pool, size, self.blocks),
            )
            offsets = [[0] * count, [0] * count]
        else:
            used = self.slot
            pools = (PhysicalPool(self.base, used, self.blocks, self.slot, 0),)
            offsets = [[self.where(layer, kv, 0) for layer in range(count)] for kv in (0, 1)]
        heads = HeadInterval(first_head, first_head + self.shape.heads)
        if self.layout == "one_view":
            layers = [layer for layer in range(count) for _ in (0, 1)]
            both = [offsets[kv][layer] for layer in range(count) for kv in (0, 1)]
            views = (PoolView(frozenset({"k", "v"}), MapperKind.NHD, 0, entries(layers, both, size), heads),)
        else:
            views = tuple(
                PoolView(
                    frozenset({name}),
                    MapperKind.NHD,
                    kv if len(pools) == 2 else 0,
                    entries(list(range(count)), offsets[kv], size),
                    heads,
                )
                for kv, name in enumerate("kv")
            )
        group = AttentionGroup(self.shape.layers, self.shape.tokens_per_block, views)
        return PageTable(self._regions(), pools, (group,))

    def _regions(self) -> tuple[RegisteredRegion, ...]:
        if self.regions == 1:
            return (RegisteredRegion(self.base, self.size, self.kind),)
        # Adjacent registrations whose borders fall between buffers.
        step = self.shape.buffer * max(1, self.size // self.shape.buffer // self.regions)
        cuts = [*range(0, self.size - step + 1, step)[: self.regions], self.size]
        spans = pairwise(cuts)
        return tuple(RegisteredRegion(self.base + a, b - a, self.kind) for a, b in spans)

    def fill(self, prompt_blocks: NDArray[np.int32], seed: int) -> None:
        """Writes position-coded bytes for every token of the listed blocks, with plain loops."""
        for ordinal, block in enumerate(prompt_blocks.tolist()):
            if block < 0:
                continue
            for layer in range(len(self.shape.layers)):
                for kv in (0, 1):
                    for token in range(self.shape.tokens_per_block):
                        for head in range(self.shape.heads):
                            position = ordinal * self.shape.tokens_per_block + token
                            code = position_code(seed, layer, kv, position, head, self.shape.unit)
                            at = (
                                GUARD
                                + self.where(layer, kv, block)
                                + (token * self.shape.heads + head) * self.shape.unit
                            )
                            self.memory[at : at + self.shape.unit] = np.frombuffer(code, np.uint8)


def position_code(seed: int, layer: int, kv: int, position: int, head: int, unit: int) -> bytes:
    """Bytes that name where they belong."""
    value = hash((seed, layer, kv, position, head)) & 0xFFFFFFFFFFFFFFFF
    return (value.to_bytes(8, "little") * (unit // 8 + 1))[:unit]


def entries(layers: list[int], offsets: list[int], size: int) -> BufferEntries:
    """Equal-sized buffers."""
    return BufferEntries(
        np.array(layers, np.uint32), np.array(offsets, np.uint64), np.full(len(layers), size, np.uint32)
    )


def rank_info(table: PageTable, rank: int = 0, tp: int = 1, backend: str = "loopback", dp: int = 1) -> RankInfo:
    """A rank that has not started: its agent's name leads nowhere."""
    topology = Topology(tp_size=tp, tp_rank=rank, dp_size=dp)
    return RankInfo(rank, topology, table, AgentDescriptor(backend, f"agent-{rank}", b"m"))


def instance(
    *ranks: RankInfo,
    role: InstanceRole = InstanceRole.GENERATION,
    name: str = "generation-0",
    model: ModelFingerprint = MODEL,
    incarnation: bytes | None = None,
) -> InstanceInfo:
    """An instance of these ranks."""
    return InstanceInfo(name, incarnation or os.urandom(16), "127.0.0.1:1", role, model, ranks)
