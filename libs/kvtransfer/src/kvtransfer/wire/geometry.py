"""kv.proto: page tables, ranks, instances."""

from __future__ import annotations

import numpy as np
from isthmus.v1 import kv_pb2

from kvtransfer.errors import WireError
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
from kvtransfer.rank_info import (
    AgentDescriptor,
    InstanceInfo,
    InstanceRole,
    ModelFingerprint,
    RankInfo,
    Topology,
)
from kvtransfer.wire._read import array, enum, geometry, limited, present, text

MAX_REGIONS = 1 << 16
MAX_POOLS = 1 << 12
MAX_GROUPS = 1 << 10
MAX_VIEWS = 1 << 10
MAX_LAYERS = 1 << 12
MAX_ENTRIES = 1 << 16
MAX_RANKS = 1 << 12
MAX_ROLES = 64
MAX_METADATA = 1 << 24
MAX_NAME = 256
MAX_DIGEST = 64
MAX_EXITED = 1 << 10

_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")


def page_table_to_pb(table: PageTable) -> kv_pb2.PageTable:
    """Any valid page table can be sent."""
    return kv_pb2.PageTable(
        regions=[
            kv_pb2.RegisteredRegion(
                base_address=region.base_address,
                size_bytes=region.size_bytes,
                memory_kind=kv_pb2.MemoryKind.Name(region.memory_kind.value),
                device_id=region.device_id,
            )
            for region in table.regions
        ],
        pools=[
            kv_pb2.PhysicalPool(
                base_address=pool.base_address,
                slot_bytes=pool.slot_bytes,
                num_slots=pool.num_slots,
                slot_stride_bytes=pool.slot_stride_bytes,
                layer_stride_bytes=pool.layer_stride_bytes,
            )
            for pool in table.pools
        ],
        groups=[kv_pb2.LayerGroup(attention=_group_to_pb(group)) for group in table.groups],
    )


def _group_to_pb(group: AttentionGroup) -> kv_pb2.AttentionGroup:
    return kv_pb2.AttentionGroup(
        global_layer_ids=group.global_layer_ids,
        tokens_per_block=group.tokens_per_block,
        sliding_window=group.sliding_window,
        views=[
            kv_pb2.PoolView(
                roles=sorted(view.roles),
                mapper_kind=kv_pb2.MapperKind.Name(view.mapper_kind.value),
                pool=view.pool,
                entries=kv_pb2.BufferEntries(
                    layer_le_u32=view.entries.layer.astype(_U32, copy=False).tobytes(),
                    offset_le_u64=view.entries.offset.astype(_U64, copy=False).tobytes(),
                    size_le_u32=view.entries.size.astype(_U32, copy=False).tobytes(),
                ),
                kv_heads=kv_pb2.HeadInterval(begin=view.kv_heads.begin, end=view.kv_heads.end),
            )
            for view in group.views
        ],
    )


def page_table_from_pb(pb: kv_pb2.PageTable, field: str = "page_table") -> PageTable:
    """Parses and validates: what comes back is safe to compute addresses with. Raises WireError."""
    limited(pb.regions, MAX_REGIONS, f"{field}.regions")
    limited(pb.pools, MAX_POOLS, f"{field}.pools")
    limited(pb.groups, MAX_GROUPS, f"{field}.groups")
    with geometry(field):
        regions = tuple(
            RegisteredRegion(
                region.base_address,
                region.size_bytes,
                enum(MemoryKind, region.memory_kind, f"{field}.regions[{i}].memory_kind"),
                region.device_id,
            )
            for i, region in enumerate(pb.regions)
        )
        pools = tuple(
            PhysicalPool(
                pool.base_address,
                pool.slot_bytes,
                pool.num_slots,
                pool.slot_stride_bytes if pool.HasField("slot_stride_bytes") else None,
                pool.layer_stride_bytes if pool.HasField("layer_stride_bytes") else None,
            )
            for pool in pb.pools
        )
        groups = tuple(_group_from_pb(group, f"{field}.groups[{i}]") for i, group in enumerate(pb.groups))
        table = PageTable(regions, pools, groups)
        table.validate()
    return table


def _group_from_pb(pb: kv_pb2.LayerGroup, field: str) -> AttentionGroup:
    if pb.WhichOneof("kind") != "attention":
        raise WireError(f"{field}.kind", "missing, or of a kind this build does not know")
    group = pb.attention
    limited(group.global_layer_ids, MAX_LAYERS, f"{field}.global_layer_ids")
    limited(group.views, MAX_VIEWS, f"{field}.views")
    return AttentionGroup(
        global_layer_ids=tuple(group.global_layer_ids),
        tokens_per_block=group.tokens_per_block,
        views=tuple(_view_from_pb(view, f"{field}.views[{i}]") for i, view in enumerate(group.views)),
        sliding_window=group.sliding_window if group.HasField("sliding_window") else None,
    )


def _view_from_pb(pb: kv_pb2.PoolView, field: str) -> PoolView:
    present(pb, "entries", field)
    present(pb, "kv_heads", field)
    limited(pb.roles, MAX_ROLES, f"{field}.roles")
    roles = frozenset(text(role, f"{field}.roles", MAX_NAME) for role in pb.roles)
    if len(roles) != len(pb.roles):
        raise WireError(f"{field}.roles", f"names a role twice: {sorted(pb.roles)}")
    entries = BufferEntries(
        array(pb.entries.layer_le_u32, _U32, MAX_ENTRIES, f"{field}.entries.layer_le_u32"),
        array(pb.entries.offset_le_u64, _U64, MAX_ENTRIES, f"{field}.entries.offset_le_u64"),
        array(pb.entries.size_le_u32, _U32, MAX_ENTRIES, f"{field}.entries.size_le_u32"),
    )
    kind = enum(MapperKind, pb.mapper_kind, f"{field}.mapper_kind")
    return PoolView(roles, kind, pb.pool, entries, HeadInterval(pb.kv_heads.begin, pb.kv_heads.end))


def rank_info_to_pb(info: RankInfo) -> kv_pb2.RankInfo:
    """Any rank can be sent."""
    topology = info.topology
    return kv_pb2.RankInfo(
        rank=info.rank,
        topology=kv_pb2.Topology(
            pp_size=topology.pp_size,
            tp_size=topology.tp_size,
            cp_size=topology.cp_size,
            dp_size=topology.dp_size,
            pp_rank=topology.pp_rank,
            tp_rank=topology.tp_rank,
            cp_rank=topology.cp_rank,
        ),
        page_table=page_table_to_pb(info.page_table),
        agent=kv_pb2.AgentDescriptor(
            backend=info.agent.backend, name=info.agent.name, metadata=info.agent.metadata, epoch=info.agent.epoch
        ),
    )


def rank_info_from_pb(pb: kv_pb2.RankInfo, field: str = "rank_info") -> RankInfo:
    """Raises WireError naming the field."""
    for name in ("topology", "page_table", "agent"):
        present(pb, name, field)
    limited(pb.agent.metadata, MAX_METADATA, f"{field}.agent.metadata")
    t = pb.topology
    with geometry(field):
        return RankInfo(
            pb.rank,
            Topology(t.pp_size, t.tp_size, t.cp_size, t.dp_size, t.pp_rank, t.tp_rank, t.cp_rank),
            page_table_from_pb(pb.page_table, f"{field}.page_table"),
            AgentDescriptor(
                text(pb.agent.backend, f"{field}.agent.backend", MAX_NAME),
                text(pb.agent.name, f"{field}.agent.name", MAX_NAME),
                pb.agent.metadata,
                pb.agent.epoch,
            ),
        )


def model_to_pb(model: ModelFingerprint) -> kv_pb2.ModelFingerprint:
    """Any fingerprint can be sent."""
    return kv_pb2.ModelFingerprint(
        weights_digest=model.weights_digest, attention_digest=model.attention_digest, kv_dtype=model.kv_dtype
    )


def model_from_pb(pb: kv_pb2.ModelFingerprint, field: str = "model") -> ModelFingerprint:
    """Raises WireError when a digest or the dtype is missing."""
    for name in ("weights_digest", "attention_digest", "kv_dtype"):
        value: bytes | str = getattr(pb, name)
        limited(value, MAX_DIGEST, f"{field}.{name}")
        if not value:
            raise WireError(f"{field}.{name}", "missing")
    return ModelFingerprint(pb.weights_digest, pb.attention_digest, pb.kv_dtype)


def instance_info_to_pb(info: InstanceInfo) -> kv_pb2.InstanceInfo:
    """Any instance can be sent."""
    pb = kv_pb2.InstanceInfo(
        instance_id=info.instance_id,
        incarnation=info.incarnation,
        endpoint=info.endpoint,
        model=model_to_pb(info.model),
        ranks=[rank_info_to_pb(rank) for rank in info.ranks],
        exited_incarnations=info.exited_incarnations,
    )
    pb.role = info.role.value  # type: ignore[assignment]  # enums are ints on the wire
    return pb


def instance_info_from_pb(pb: kv_pb2.InstanceInfo, field: str = "instance") -> InstanceInfo:
    """Raises WireError naming the field; page tables come back validated."""
    present(pb, "model", field)
    limited(pb.ranks, MAX_RANKS, f"{field}.ranks")
    limited(pb.exited_incarnations, MAX_EXITED, f"{field}.exited_incarnations")
    with geometry(field):
        return InstanceInfo(
            instance_id=text(pb.instance_id, f"{field}.instance_id", MAX_NAME),
            incarnation=pb.incarnation,
            endpoint=text(pb.endpoint, f"{field}.endpoint", MAX_NAME),
            role=enum(InstanceRole, pb.role, f"{field}.role"),
            model=model_from_pb(pb.model, f"{field}.model"),
            ranks=tuple(rank_info_from_pb(rank, f"{field}.ranks[{i}]") for i, rank in enumerate(pb.ranks)),
            exited_incarnations=tuple(pb.exited_incarnations),
        )
