"""kv.proto: ranks, models, instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.v1 import kv_pb2

from kvtransfer.errors import WireError
from kvtransfer.rank_info import (
    BESIDE,
    AgentDescriptor,
    InstanceInfo,
    InstanceRole,
    ModelFingerprint,
    RankInfo,
    Topology,
)
from kvtransfer.wire._read import enum, extra, geometry, limited, present, text
from kvtransfer.wire.page_tables import MAX_LAYERS, region_from_pb, region_to_pb
from kvtransfer.wire.page_tables import MAX_NAME as MAX_NAME
from kvtransfer.wire.page_tables import page_table_from_pb as page_table_from_pb
from kvtransfer.wire.page_tables import page_table_to_pb as page_table_to_pb

if TYPE_CHECKING:
    from kvtransfer.pools import RegisteredRegion

MAX_RANKS = 1 << 12
MAX_METADATA = 1 << 24
MAX_DIGEST = 64
MAX_EXITED = 1 << 10


def rank_info_to_pb(info: RankInfo) -> kv_pb2.RankInfo:
    """Any rank can be sent."""
    topology = info.topology
    pb = kv_pb2.RankInfo(
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
    for name in BESIDE:
        region: RegisteredRegion | None = getattr(info, name)
        if region is not None:
            getattr(pb, name).CopyFrom(region_to_pb(region))
    pb.MergeFromString(info.extra)
    return pb


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
            extra(pb, field),
            *(region_from_pb(getattr(pb, one), f"{field}.{one}") if pb.HasField(one) else None for one in BESIDE),
        )


def model_to_pb(model: ModelFingerprint) -> kv_pb2.ModelFingerprint:
    """Any fingerprint can be sent."""
    return kv_pb2.ModelFingerprint(
        weights_digest=model.weights_digest,
        attention_digest=model.attention_digest,
        kv_dtype=model.kv_dtype,
        quantization=model.quantization,
        scale_digest=model.scale_digest,
        draft_digest=model.draft_digest,
        draft_layers=model.draft_layers,
    )


def model_from_pb(pb: kv_pb2.ModelFingerprint, field: str = "model") -> ModelFingerprint:
    """Raises WireError when a digest or the dtype is missing."""
    for name in ("weights_digest", "attention_digest", "kv_dtype"):
        value: bytes | str = getattr(pb, name)
        limited(value, MAX_DIGEST, f"{field}.{name}")
        if not value:
            raise WireError(f"{field}.{name}", "missing")
    for name in ("quantization", "scale_digest", "draft_digest"):
        limited(getattr(pb, name), MAX_DIGEST, f"{field}.{name}")
    limited(pb.draft_layers, MAX_LAYERS, f"{field}.draft_layers")
    return ModelFingerprint(
        pb.weights_digest,
        pb.attention_digest,
        pb.kv_dtype,
        pb.quantization,
        pb.scale_digest,
        pb.draft_digest,
        tuple(pb.draft_layers),
    )


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
    pb.MergeFromString(info.extra)
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
            extra=extra(pb, field),
        )
