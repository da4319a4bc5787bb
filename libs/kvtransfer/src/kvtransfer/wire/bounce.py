"""transfer_bounce.proto and transfer_bounce_ipc.proto: chunks, between hubs and between a hub and its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from isthmus.v1 import transfer_bounce_ipc_pb2, transfer_bounce_pb2, transfer_pb2

from kvtransfer.bounce_ports import (
    BounceChunk,
    ChunkName,
    ChunkReady,
    Grant,
    MeetSource,
    PeerWord,
    PrepareScatter,
    Scattered,
    ScatterOrder,
)
from kvtransfer.errors import WireError
from kvtransfer.wire._read import MAX_REASON_SENT, incarnation, limited, present, text
from kvtransfer.wire.block_lists import block_lists_from_pb, block_lists_to_pb
from kvtransfer.wire.common import (
    key_from_pb,
    key_to_pb,
    tokens_from_pb,
    tokens_to_pb,
)
from kvtransfer.wire.geometry import instance_info_from_pb, instance_info_to_pb
from kvtransfer.wire.page_tables import MAX_NAME
from kvtransfer.wire.stages import MAX_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_GROUPS = 1 << 12
# Far above any arena: sums of two such numbers stay exact everywhere.
MAX_BYTES = 1 << 62


def bounce_to_pb(body: ChunkReady | Grant | BounceChunk) -> transfer_pb2.PeerMessage:
    """What two hubs say about chunks."""
    match body:
        case ChunkReady():
            return transfer_pb2.PeerMessage(chunk_ready=_ready_to_pb(body))
        case Grant():
            return transfer_pb2.PeerMessage(grant=grant_to_pb(body))
        case BounceChunk():
            return transfer_pb2.PeerMessage(bounce_chunk=chunk_to_pb(body))


def chunk_ready_from_pb(pb: transfer_bounce_pb2.ChunkReady, field: str = "chunk_ready") -> ChunkReady:
    """Raises WireError naming the field."""
    if not 0 < pb.bytes <= MAX_BYTES:
        raise WireError(f"{field}.bytes", f"{pb.bytes}: a chunk has bytes, at most {MAX_BYTES}")
    limited(pb.layer_groups, MAX_GROUPS, f"{field}.layer_groups")
    window = tokens_from_pb(pb.window, f"{field}.window") if pb.HasField("window") else None
    return ChunkReady(_name_from_pb(pb, field), pb.bytes, pb.host, window, tuple(pb.layer_groups))


def grant_to_pb(grant: Grant) -> transfer_bounce_pb2.Grant:
    """Between hubs, and from a hub to a rank."""
    return transfer_bounce_pb2.Grant(name=_name_to_pb(grant.name), offset=grant.offset, bytes=grant.nbytes)


def grant_from_pb(pb: transfer_bounce_pb2.Grant, field: str = "grant") -> Grant:
    """Raises WireError naming the field."""
    _bounded(pb.offset, f"{field}.offset")
    _bounded(pb.bytes, f"{field}.bytes")
    return Grant(_name_from_pb(pb, field), pb.offset, pb.bytes)


def chunk_to_pb(chunk: BounceChunk) -> transfer_bounce_pb2.BounceChunk:
    """Between hubs, and inside local messages."""
    return transfer_bounce_pb2.BounceChunk(
        name=_name_to_pb(chunk.name),
        window=tokens_to_pb(chunk.window),
        packed_begin=chunk.begin,
        packed_end=chunk.end,
        arena_offset=chunk.offset,
        layer_groups=chunk.layer_groups,
        host=chunk.host,
    )


def chunk_from_pb(pb: transfer_bounce_pb2.BounceChunk, field: str = "bounce_chunk") -> BounceChunk:
    """Raises WireError naming the field."""
    present(pb, "window", field)
    limited(pb.layer_groups, MAX_GROUPS, f"{field}.layer_groups")
    _bounded(pb.packed_end, f"{field}.packed_end")
    _bounded(pb.arena_offset, f"{field}.arena_offset")
    if pb.packed_begin >= pb.packed_end:
        raise WireError(f"{field}.packed_end", f"[{pb.packed_begin}, {pb.packed_end}) is empty or runs backwards")
    return BounceChunk(
        _name_from_pb(pb, field),
        tokens_from_pb(pb.window, f"{field}.window"),
        pb.packed_begin,
        pb.packed_end,
        pb.arena_offset,
        tuple(pb.layer_groups),
        pb.host,
    )


def peer_word_to_pb(word: PeerWord) -> transfer_bounce_ipc_pb2.PeerWord:
    """Rank to hub."""
    pb = transfer_bounce_ipc_pb2.PeerWord(instance_id=word.instance_id, incarnation=word.incarnation)
    match word.body:
        case ChunkReady():
            pb.chunk_ready.CopyFrom(_ready_to_pb(word.body))
        case BounceChunk():
            pb.chunk.CopyFrom(chunk_to_pb(word.body))
    return pb


def peer_word_from_pb(pb: transfer_bounce_ipc_pb2.PeerWord) -> PeerWord:
    """Raises WireError naming the field."""
    match cast("str | None", pb.WhichOneof("body")):
        case "chunk_ready":
            body = chunk_ready_from_pb(pb.chunk_ready, "peer_word.chunk_ready")
        case "chunk":
            body = chunk_from_pb(pb.chunk, "peer_word.chunk")
        case _:
            raise WireError("peer_word.body", "missing, or of a kind this build does not know")
    instance_id = text(pb.instance_id, "peer_word.instance_id", MAX_NAME)
    return PeerWord(instance_id, incarnation(pb.incarnation, "peer_word"), body)


def meet_source_to_pb(meet: MeetSource) -> transfer_bounce_ipc_pb2.MeetSource:
    """Hub to rank."""
    return transfer_bounce_ipc_pb2.MeetSource(peer=instance_info_to_pb(meet.peer), own=instance_info_to_pb(meet.own))


def meet_source_from_pb(pb: transfer_bounce_ipc_pb2.MeetSource) -> MeetSource:
    """Raises WireError naming the field."""
    present(pb, "peer", "meet_source")
    present(pb, "own", "meet_source")
    own = instance_info_from_pb(pb.own, "meet_source.own")
    return MeetSource(instance_info_from_pb(pb.peer, "meet_source.peer"), own)


def prepare_scatter_to_pb(prepare: PrepareScatter) -> transfer_bounce_ipc_pb2.PrepareScatter:
    """Hub to rank."""
    return transfer_bounce_ipc_pb2.PrepareScatter(
        instance_id=prepare.instance_id,
        incarnation=prepare.incarnation,
        name=_name_to_pb(prepare.name),
        window=tokens_to_pb(prepare.window),
        layer_groups=prepare.layer_groups,
        tokens=tokens_to_pb(prepare.tokens),
        destinations=block_lists_to_pb(prepare.destinations),
    )


def prepare_scatter_from_pb(pb: transfer_bounce_ipc_pb2.PrepareScatter) -> PrepareScatter:
    """Raises WireError naming the field."""
    for field in ("window", "tokens"):
        present(pb, field, "prepare_scatter")
    limited(pb.layer_groups, MAX_GROUPS, "prepare_scatter.layer_groups")
    return PrepareScatter(
        text(pb.instance_id, "prepare_scatter.instance_id", MAX_NAME),
        incarnation(pb.incarnation, "prepare_scatter"),
        _name_from_pb(pb, "prepare_scatter"),
        tokens_from_pb(pb.window, "prepare_scatter.window"),
        tuple(pb.layer_groups),
        tokens_from_pb(pb.tokens, "prepare_scatter.tokens"),
        block_lists_from_pb(pb.destinations, "prepare_scatter.destinations"),
    )


def scatter_order_to_pb(order: ScatterOrder) -> transfer_bounce_ipc_pb2.ScatterOrder:
    """Hub to rank."""
    return transfer_bounce_ipc_pb2.ScatterOrder(
        instance_id=order.instance_id,
        incarnation=order.incarnation,
        chunk=chunk_to_pb(order.chunk),
        tokens=tokens_to_pb(order.tokens),
        destinations=block_lists_to_pb(order.destinations),
    )


def scatter_order_from_pb(pb: transfer_bounce_ipc_pb2.ScatterOrder) -> ScatterOrder:
    """Raises WireError naming the field."""
    present(pb, "chunk", "scatter")
    present(pb, "tokens", "scatter")
    return ScatterOrder(
        text(pb.instance_id, "scatter.instance_id", MAX_NAME),
        incarnation(pb.incarnation, "scatter"),
        chunk_from_pb(pb.chunk, "scatter.chunk"),
        tokens_from_pb(pb.tokens, "scatter.tokens"),
        block_lists_from_pb(pb.destinations, "scatter.destinations"),
    )


def scattered_to_pb(scattered: Scattered) -> transfer_bounce_ipc_pb2.Scattered:
    """Rank to hub."""
    problem = scattered.problem[:MAX_REASON_SENT]
    return transfer_bounce_ipc_pb2.Scattered(
        name=_name_to_pb(scattered.name), problem=problem, seconds=scattered.seconds
    )


def scattered_from_pb(pb: transfer_bounce_ipc_pb2.Scattered) -> Scattered:
    """Raises WireError naming the field."""
    if not 0 <= pb.seconds < MAX_SECONDS:
        raise WireError("scattered.seconds", f"{pb.seconds} s is not a duration from 0 on")
    return Scattered(_name_from_pb(pb, "scattered"), text(pb.problem, "scattered.problem"), pb.seconds)


READERS = cast(
    "dict[str, Callable[[object], ChunkReady | Grant | BounceChunk]]",
    {"chunk_ready": chunk_ready_from_pb, "grant": grant_from_pb, "bounce_chunk": chunk_from_pb},
)


def _ready_to_pb(ready: ChunkReady) -> transfer_bounce_pb2.ChunkReady:
    window = None if ready.window is None else tokens_to_pb(ready.window)
    return transfer_bounce_pb2.ChunkReady(
        name=_name_to_pb(ready.name),
        bytes=ready.nbytes,
        host=ready.host,
        window=window,
        layer_groups=ready.layer_groups,
    )


def _name_to_pb(name: ChunkName) -> transfer_bounce_pb2.ChunkName:
    return transfer_bounce_pb2.ChunkName(
        key=key_to_pb(name.key), receive=name.receive, src_rank=name.src_rank, dst_rank=name.dst_rank, seq=name.seq
    )


def _name_from_pb(
    pb: transfer_bounce_pb2.ChunkReady
    | transfer_bounce_pb2.Grant
    | transfer_bounce_pb2.BounceChunk
    | transfer_bounce_ipc_pb2.PrepareScatter
    | transfer_bounce_ipc_pb2.Scattered,
    field: str,
) -> ChunkName:
    present(pb, "name", field)
    present(pb.name, "key", f"{field}.name")
    name = pb.name
    return ChunkName(key_from_pb(name.key, f"{field}.name.key"), name.receive, name.src_rank, name.dst_rank, name.seq)


def _bounded(value: int, field: str) -> None:
    if value > MAX_BYTES:
        raise WireError(field, f"{value}, at most {MAX_BYTES}")
