"""The only module that knows the planner's data model: an oracle's storage as page tables, ranks and instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.deployment import head_interval
from kv_oracle.model import Attention, Part, State
from kv_oracle.storage import Coordinate, RankGroup, RankStorage, build_storage, local_sections
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
    ShardingKind,
    TokenSharding,
)
from kvtransfer.rank_info import AgentDescriptor, InstanceInfo, InstanceRole, ModelFingerprint, RankInfo, Topology

if TYPE_CHECKING:
    from kv_oracle.deployment import Deployment
    from kv_oracle.model import Model

MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "U8")


@dataclass(frozen=True)
class Instance:
    """`storages`, `places` and `info.ranks` in flat order."""

    deployment: Deployment
    storages: tuple[RankStorage, ...]
    places: tuple[Coordinate, ...]
    info: InstanceInfo

    @property
    def holders(self) -> tuple[int, ...]:
        """Flat ranks that hold the request: those of its attention-dp group."""
        return tuple(r for r, place in enumerate(self.places) if place.dp == self.deployment.dp_rank)


def build_instance(
    model: Model, deployment: Deployment, slots: tuple[int, ...], role: InstanceRole, name: str
) -> Instance:
    """All ranks of an instance. `slots` per group of the model."""
    places = [
        Coordinate(stage, tp, cp, dp)
        for stage in range(len(deployment.pp))
        for dp in range(deployment.dp)
        for tp in range(deployment.tp)
        for cp in range(deployment.cp)
    ]
    storages: list[RankStorage] = []
    ranks: list[RankInfo] = []
    for rank, place in enumerate(places):
        storage = build_storage(model, deployment, place, slots, base=(rank + 1) * (1 << 36) + 11 * rank)
        topology = Topology(
            pp_size=len(deployment.pp),
            tp_size=deployment.tp * deployment.dp,
            cp_size=deployment.cp,
            dp_size=deployment.dp,
            pp_rank=place.stage,
            tp_rank=place.dp * deployment.tp + place.tp,
            cp_rank=place.cp,
        )
        table = page_table(model, deployment, place, storage)
        storages.append(storage)
        ranks.append(RankInfo(rank, topology, table, AgentDescriptor("loopback", f"{name}-{rank}", b"m")))
    info = InstanceInfo(name, (name * 16).encode()[:16], "127.0.0.1:1", role, MODEL, tuple(ranks))
    return Instance(deployment, tuple(storages), tuple(places), info)


def page_table(model: Model, deployment: Deployment, place: Coordinate, storage: RankStorage) -> PageTable:
    """One rank's storage as the planner reads it."""
    return PageTable(
        regions=tuple(RegisteredRegion(base, size, MemoryKind.DRAM) for base, size in storage.regions),
        pools=tuple(
            PhysicalPool(pool.base, pool.slot_bytes, pool.slots, pool.slot_stride, pool.layer_stride)
            for pool in storage.pools
        ),
        groups=tuple(_group(model, deployment, place, group) for group in storage.groups),
    )


def _group(
    model: Model, deployment: Deployment, place: Coordinate, group: RankGroup
) -> AttentionGroup | RecurrentGroup:
    described, storage = model.groups[group.group], deployment.groups[group.group]
    views = tuple(_view(model, deployment, place, group, v) for v in range(len(group.views)))
    if not isinstance(described, Attention):
        return RecurrentGroup(group.layers, views)
    sharding = None
    if storage.sharding is not None:
        kind, grain = storage.sharding
        sharding = TokenSharding(ShardingKind[kind.upper()], grain)
    return AttentionGroup(
        group.layers,
        storage.tokens_per_block,
        views,
        sliding_window=described.window,
        draft_slack=storage.draft_slack if described.window is not None else 0,
        token_sharding=sharding,
    )


def _view(model: Model, deployment: Deployment, place: Coordinate, group: RankGroup, index: int) -> PoolView:
    view = group.views[index]
    part: Part | State = model.groups[group.group].parts[view.part]
    layer, offset, size = zip(*view.entries, strict=True)
    entries = BufferEntries(np.array(layer, np.uint32), np.array(offset, np.uint64), np.array(size, np.uint32))
    roles = frozenset(part.roles)
    if isinstance(part, State) and part.opaque:
        return PoolView(roles, MapperKind.REPLICATED, view.pool, entries)
    if isinstance(part, State):
        cut = local_sections(part, deployment.heads, deployment.tp, place.tp)
        sections = tuple(Section(s.name, begin, end, s.unit_bytes) for s, begin, end in cut)
        return PoolView(roles, MapperKind.SECTIONED, view.pool, entries, sections=sections, rows=part.rows)
    if part.heads == 0:
        return PoolView(roles, MapperKind.REPLICATED, view.pool, entries)
    layout = deployment.groups[group.group].layouts[view.part]
    heads = HeadInterval(*head_interval(deployment.heads, part.heads, deployment.tp, place.tp))
    return PoolView(roles, MapperKind[layout.upper()], view.pool, entries, heads)
