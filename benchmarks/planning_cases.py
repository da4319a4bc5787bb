"""The deployments that `planning.py` measures: real model shapes, memory that is described but never allocated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    LayerGroup,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RecurrentGroup,
    RegisteredRegion,
    Section,
)
from kvtransfer.rank_info import AgentDescriptor, InstanceInfo, InstanceRole, ModelFingerprint, RankInfo, Topology

BASE = 1 << 44
MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "BF16")


@dataclass(frozen=True)
class Layout:
    """One side of a case. `slot_major`: a block of all layers is one slot; otherwise a pool of K and one of V."""

    tp: int
    tokens_per_block: int = 32
    kind: MapperKind = MapperKind.HND
    slot_major: bool = False


@dataclass(frozen=True)
class Case:
    """`token_bytes`: of one head of K or V (of the latent for MLA). `recurrent`: layers with a state beside them."""

    name: str
    layers: int
    heads: int
    token_bytes: int
    tokens: int
    src: Layout
    dst: Layout
    mla: bool = False
    recurrent: int = 0
    # Aim for a request in milliseconds; None = none is set for writing every run out.
    aim_ms: float | None = None


HND, NHD = MapperKind.HND, MapperKind.NHD
K = 1 << 10
CASES = (
    Case("qwen3-235b 8K tp4>tp8 hnd", 94, 4, 256, 8 * K, Layout(4), Layout(8), aim_ms=0.3),
    Case(
        "qwen3-235b 8K slot-major",
        94,
        4,
        256,
        8 * K,
        Layout(4, slot_major=True),
        Layout(8, slot_major=True),
        aim_ms=0.3,
    ),
    Case("llama-70b 8K tp8>tp4 hnd", 80, 8, 256, 8 * K, Layout(8), Layout(4), aim_ms=1.0),
    Case("llama-70b 8K tp4>tp8 32>64", 80, 8, 256, 8 * K, Layout(4), Layout(8, 64), aim_ms=1.0),
    Case("llama-70b 128K tp8>tp4 hnd", 80, 8, 256, 128 * K, Layout(8), Layout(4)),
    Case("llama-70b 128K tp8>tp4 nhd", 80, 8, 256, 128 * K, Layout(8, kind=NHD), Layout(4, kind=NHD)),
    Case("deepseek mla 128K tp8>tp8", 61, 1, 1152, 128 * K, Layout(8, 64), Layout(8, 64), mla=True),
    Case("hybrid 32K tp2>tp4", 12, 8, 256, 32 * K, Layout(2), Layout(4), recurrent=36),
)


def heads_of(case: Case, layout: Layout, rank: int) -> HeadInterval:
    """Global heads of a tensor-parallel rank: an equal share, or one shared by several ranks."""
    if case.mla:
        return HeadInterval(0, 1)
    if layout.tp >= case.heads:
        head = rank * case.heads // layout.tp
        return HeadInterval(head, head + 1)
    share = case.heads // layout.tp
    return HeadInterval(rank * share, (rank + 1) * share)


def instance(case: Case, layout: Layout, role: InstanceRole) -> InstanceInfo:
    """All ranks of one side."""
    ranks = tuple(
        RankInfo(
            rank,
            Topology(tp_size=layout.tp, tp_rank=rank),
            page_table(case, layout, rank),
            AgentDescriptor("loopback", f"{role.name}-{rank}", b""),
        )
        for rank in range(layout.tp)
    )
    return InstanceInfo(f"{role.name.lower()}-0", bytes(16), "h:1", role, MODEL, ranks)


def page_table(case: Case, layout: Layout, rank: int) -> PageTable:
    """The storage of one rank."""
    heads = heads_of(case, layout, rank)
    blocks = 2 * case.tokens // layout.tokens_per_block
    buffer = layout.tokens_per_block * len(heads) * case.token_bytes
    roles = ("latent",) if case.mla else ("key", "value")
    kind = MapperKind.REPLICATED if case.mla else layout.kind
    layer = np.arange(case.layers, dtype=np.uint32)
    size = np.full(case.layers, buffer, np.uint32)
    slot = buffer * len(roles) * case.layers
    pools, views = list[PhysicalPool](), list[PoolView]()
    for i, role in enumerate(roles):
        if layout.slot_major:
            pools = [PhysicalPool(BASE, slot, blocks, layer_stride_bytes=0)]
            offset = (layer.astype(np.uint64) * np.uint64(len(roles)) + np.uint64(i)) * np.uint64(buffer)
        else:
            pools.append(PhysicalPool(BASE + i * case.layers * blocks * buffer, buffer, blocks))
            offset = np.zeros(case.layers, np.uint64)
        pool = len(pools) - 1
        views.append(PoolView(frozenset({role}), kind, pool, BufferEntries(layer, offset, size), heads))
    groups: list[LayerGroup] = [AttentionGroup(tuple(range(case.layers)), layout.tokens_per_block, tuple(views))]
    end = BASE + blocks * slot
    if case.recurrent:
        pool, group, end = recurrent(case, layout, rank, len(pools), end)
        pools.append(pool)
        groups.append(group)
    return PageTable((RegisteredRegion(BASE, end - BASE, MemoryKind.VRAM),), tuple(pools), tuple(groups))


def recurrent(
    case: Case, layout: Layout, rank: int, number: int, base: int
) -> tuple[PhysicalPool, RecurrentGroup, int]:
    """Convolution [x|B|C] and state of `case.recurrent` layers, 64 slots: pool, group, end of its memory."""
    share = 8192 // layout.tp
    conv = (
        Section("x", rank * share, (rank + 1) * share, 8),
        Section("B", 0, 128, 8),
        Section("C", 0, 128, 8),
    )
    ssm = (Section("heads", rank * 128 // layout.tp, (rank + 1) * 128 // layout.tp, 64 * 128 * 4),)
    sizes = [sum(one.nbytes for one in sections) for sections in (conv, ssm)]
    slot = sum(sizes)
    layer = np.arange(case.recurrent, dtype=np.uint32)
    views = tuple(
        PoolView(
            frozenset({role}),
            MapperKind.SECTIONED,
            number,
            BufferEntries(layer, np.full(len(layer), at, np.uint64), np.full(len(layer), size, np.uint32)),
            sections=sections,
        )
        for role, sections, at, size in (("conv", conv, 0, sizes[0]), ("ssm", ssm, sizes[0], sizes[1]))
    )
    ids = tuple(range(case.layers, case.layers + case.recurrent))
    return PhysicalPool(base, slot, 64), RecurrentGroup(ids, views), base + 64 * case.recurrent * slot
