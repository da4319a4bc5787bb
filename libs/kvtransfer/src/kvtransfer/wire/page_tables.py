"""kv.proto: page tables. What comes back has been validated: it is safe to compute addresses with."""

from __future__ import annotations

from typing import cast

import numpy as np
from isthmus.v1 import kv_pb2

from kvtransfer.errors import WireError
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
    ShardingKind,
    TokenSharding,
)
from kvtransfer.wire._read import array, enum, extra, geometry, limited, present, text

MAX_REGIONS = 1 << 16
MAX_POOLS = 1 << 12
MAX_GROUPS = 1 << 10
MAX_VIEWS = 1 << 10
MAX_LAYERS = 1 << 12
MAX_ENTRIES = 1 << 16
MAX_ROLES = 64
MAX_SECTIONS = 64
MAX_FEATURES = 64
MAX_NAME = 256

# Extensions of the page table that this build understands.
PITCH = "unit_pitch"
KNOWN_FEATURES: frozenset[str] = frozenset({PITCH})

_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")


def region_to_pb(region: RegisteredRegion) -> kv_pb2.RegisteredRegion:
    """Any region can be sent."""
    return kv_pb2.RegisteredRegion(
        base_address=region.base_address,
        size_bytes=region.size_bytes,
        memory_kind=kv_pb2.MemoryKind.Name(region.memory_kind.value),
        device_id=region.device_id,
    )


def region_from_pb(pb: kv_pb2.RegisteredRegion, field: str = "region") -> RegisteredRegion:
    """Raises WireError for a kind of the future. Raises GeometryError for impossible numbers, see `geometry`."""
    kind = enum(MemoryKind, pb.memory_kind, f"{field}.memory_kind")
    return RegisteredRegion(pb.base_address, pb.size_bytes, kind, pb.device_id)


def page_table_to_pb(table: PageTable) -> kv_pb2.PageTable:
    """Any valid page table can be sent."""
    pb = kv_pb2.PageTable(
        regions=[region_to_pb(region) for region in table.regions],
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
        groups=[_group_to_pb(group) for group in table.groups],
    )
    pb.MergeFromString(table.extra)
    if any(view.pitch is not None for group in table.groups for view in group.views):
        # Who does not know it would take units for neighbours.
        pb.required_features.append(PITCH)
    return pb


def _group_to_pb(group: LayerGroup) -> kv_pb2.LayerGroup:
    views = [_view_to_pb(view) for view in group.views]
    if isinstance(group, RecurrentGroup):
        recurrent = kv_pb2.RecurrentGroup(global_layer_ids=group.global_layer_ids, views=views)
        return kv_pb2.LayerGroup(recurrent=recurrent)
    sharding = group.token_sharding
    pb = kv_pb2.AttentionGroup(
        global_layer_ids=group.global_layer_ids,
        tokens_per_block=group.tokens_per_block,
        sliding_window=group.sliding_window,
        views=views,
        draft_slack=group.draft_slack,
    )
    if sharding is not None:
        kind = kv_pb2.TokenShardingKind.Name(sharding.kind.value)
        pb.token_sharding.CopyFrom(kv_pb2.TokenSharding(kind=kind, granularity=sharding.granularity))
    return kv_pb2.LayerGroup(attention=pb)


def _view_to_pb(view: PoolView) -> kv_pb2.PoolView:
    return kv_pb2.PoolView(
        roles=sorted(view.roles),
        mapper_kind=kv_pb2.MapperKind.Name(view.mapper_kind.value),
        pool=view.pool,
        entries=kv_pb2.BufferEntries(
            layer_le_u32=view.entries.layer.astype(_U32, copy=False).tobytes(),
            offset_le_u64=view.entries.offset.astype(_U64, copy=False).tobytes(),
            size_le_u32=view.entries.size.astype(_U32, copy=False).tobytes(),
        ),
        kv_heads=kv_pb2.HeadInterval(begin=view.kv_heads.begin, end=view.kv_heads.end),
        sections=[
            kv_pb2.Section(label=one.label, begin=one.begin, end=one.end, unit_bytes=one.unit_bytes)
            for one in view.sections
        ],
        rows=view.rows,
        pitch_bytes=view.pitch,
    )


def page_table_from_pb(pb: kv_pb2.PageTable, field: str = "page_table") -> PageTable:
    """Parses and validates. Raises WireError: wrong values, too many of anything, kinds or features of the future."""
    limited(pb.regions, MAX_REGIONS, f"{field}.regions")
    limited(pb.pools, MAX_POOLS, f"{field}.pools")
    limited(pb.groups, MAX_GROUPS, f"{field}.groups")
    _features(pb, field)
    with geometry(field):
        regions = tuple(region_from_pb(region, f"{field}.regions[{i}]") for i, region in enumerate(pb.regions))
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
        table = PageTable(regions, pools, groups, extra(pb, field))
        table.validate()
    return table


def _features(pb: kv_pb2.PageTable, field: str) -> None:
    limited(pb.required_features, MAX_FEATURES, f"{field}.required_features")
    unknown = sorted(set(pb.required_features) - KNOWN_FEATURES)
    if unknown:
        known = ", ".join(sorted(KNOWN_FEATURES)) or "none"
        names = ", ".join(repr(name[:MAX_NAME]) for name in unknown)
        raise WireError(f"{field}.required_features", f"{names} not known here (known: {known}); update this side")


def _group_from_pb(pb: kv_pb2.LayerGroup, field: str) -> LayerGroup:
    match cast("str | None", pb.WhichOneof("kind")):
        case "attention":
            return _attention_from_pb(pb.attention, field)
        case "recurrent":
            layers, views = _layers_and_views(pb.recurrent, field)
            return RecurrentGroup(layers, views)
        case _:
            raise WireError(f"{field}.kind", "missing, or of a kind this build does not know")


def _attention_from_pb(group: kv_pb2.AttentionGroup, field: str) -> AttentionGroup:
    layers, views = _layers_and_views(group, field)
    sharding: TokenSharding | None = None
    if group.HasField("token_sharding"):
        kind = enum(ShardingKind, group.token_sharding.kind, f"{field}.token_sharding.kind")
        sharding = TokenSharding(kind, group.token_sharding.granularity)
    return AttentionGroup(
        global_layer_ids=layers,
        tokens_per_block=group.tokens_per_block,
        views=views,
        sliding_window=group.sliding_window if group.HasField("sliding_window") else None,
        draft_slack=group.draft_slack,
        token_sharding=sharding,
    )


def _layers_and_views(
    group: kv_pb2.AttentionGroup | kv_pb2.RecurrentGroup, field: str
) -> tuple[tuple[int, ...], tuple[PoolView, ...]]:
    limited(group.global_layer_ids, MAX_LAYERS, f"{field}.global_layer_ids")
    limited(group.views, MAX_VIEWS, f"{field}.views")
    views = tuple(_view_from_pb(view, f"{field}.views[{i}]") for i, view in enumerate(group.views))
    return tuple(group.global_layer_ids), views


def _view_from_pb(pb: kv_pb2.PoolView, field: str) -> PoolView:
    present(pb, "entries", field)
    present(pb, "kv_heads", field)
    limited(pb.roles, MAX_ROLES, f"{field}.roles")
    limited(pb.sections, MAX_SECTIONS, f"{field}.sections")
    roles = frozenset(text(role, f"{field}.roles", MAX_NAME) for role in pb.roles)
    if len(roles) != len(pb.roles):
        raise WireError(f"{field}.roles", f"names a role twice: {sorted(pb.roles)}")
    return PoolView(
        roles=roles,
        mapper_kind=enum(MapperKind, pb.mapper_kind, f"{field}.mapper_kind"),
        pool=pb.pool,
        entries=BufferEntries(
            array(pb.entries.layer_le_u32, _U32, MAX_ENTRIES, f"{field}.entries.layer_le_u32"),
            array(pb.entries.offset_le_u64, _U64, MAX_ENTRIES, f"{field}.entries.offset_le_u64"),
            array(pb.entries.size_le_u32, _U32, MAX_ENTRIES, f"{field}.entries.size_le_u32"),
        ),
        kv_heads=HeadInterval(pb.kv_heads.begin, pb.kv_heads.end),
        sections=tuple(
            Section(text(one.label, f"{field}.sections[{i}].label", MAX_NAME), one.begin, one.end, one.unit_bytes)
            for i, one in enumerate(pb.sections)
        ),
        rows=pb.rows or 1,
        pitch=pb.pitch_bytes if pb.HasField("pitch_bytes") else None,
    )
