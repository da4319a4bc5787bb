"""common.proto and what the peer messages and the local messages share: keys, ranges, traces, blocks, notices."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from isthmus.v1 import common_pb2, errors_pb2, transfer_ipc_pb2, transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import (
    Extent,
    Incompatibility,
    RankBlocks,
    RequestKey,
    TokenRange,
    TraceContext,
    TransferNotice,
    TransferStats,
    WriterOutcome,
)
from kvtransfer.wire._read import MAX_REASON_SENT, array, enum, limited, present, seconds, text, write_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_REQUEST_ID = 1 << 40
MAX_REQUEST_ID = 1 << 63
MAX_BLOCK_IDS = 1 << 22
MAX_BLOCK_LISTS = 1 << 12
MAX_EXTENTS = 1 << 14
MAX_INCOMPATIBILITIES = 1 << 12

_I32 = np.dtype("<i4")


def key_to_pb(key: RequestKey) -> common_pb2.RequestKey:
    """Raises ValueError for a local id: those never travel."""
    pb = common_pb2.RequestKey()
    _write_key(key, pb)
    return pb


def _write_key(key: RequestKey, pb: common_pb2.RequestKey) -> None:
    if not MIN_REQUEST_ID <= key.request_id < MAX_REQUEST_ID:
        raise ValueError(f"request id {key.request_id} is not in [2^40, 2^63): local ids never travel")
    pb.request_id, pb.attempt = key.request_id, key.attempt


def key_from_pb(pb: common_pb2.RequestKey, field: str = "key") -> RequestKey:
    """Raises WireError when the id is outside [2^40, 2^63)."""
    if not MIN_REQUEST_ID <= pb.request_id < MAX_REQUEST_ID:
        raise WireError(f"{field}.request_id", f"{pb.request_id} is not in [2^40, 2^63)")
    return RequestKey(pb.request_id, pb.attempt)


def tokens_to_pb(tokens: TokenRange) -> common_pb2.TokenRange:
    """Any range of positions below 2^32."""
    return common_pb2.TokenRange(begin=tokens.begin, end=tokens.end)


def tokens_from_pb(pb: common_pb2.TokenRange, field: str = "tokens") -> TokenRange:
    """May be empty. Raises WireError when it runs backwards."""
    if pb.begin > pb.end:
        raise WireError(field, f"[{pb.begin}, {pb.end}) runs backwards")
    return TokenRange(pb.begin, pb.end)


def trace_to_pb(trace: TraceContext | None) -> common_pb2.TraceContext | None:
    """None stays absent."""
    if trace is None:
        return None
    return common_pb2.TraceContext(trace_id=trace.trace_id, span_id=trace.span_id, flags=trace.flags)


def trace_from_pb(pb: common_pb2.TraceContext, field: str = "trace") -> TraceContext:
    """Raises WireError when an id has the wrong length."""
    if len(pb.trace_id) != 16 or len(pb.span_id) != 8:
        raise WireError(field, f"ids of {len(pb.trace_id)} and {len(pb.span_id)} bytes, not 16 and 8")
    return TraceContext(pb.trace_id, pb.span_id, pb.flags)


def destination_blocks_to_pb(blocks: RankBlocks) -> transfer_pb2.DestinationBlocks:
    """Blocks in a KvRequest or WriteOrder."""
    return transfer_pb2.DestinationBlocks(
        rank=blocks.rank, layer_group=blocks.layer_group, blocks=_ids_to_pb(blocks), begin=blocks.begin
    )


def rank_blocks_to_pb(blocks: RankBlocks) -> transfer_ipc_pb2.RankBlocks:
    """Blocks in a local message."""
    return transfer_ipc_pb2.RankBlocks(
        rank=blocks.rank, layer_group=blocks.layer_group, blocks=_ids_to_pb(blocks), begin=blocks.begin
    )


def _ids_to_pb(blocks: RankBlocks) -> common_pb2.BlockIds:
    return common_pb2.BlockIds(le_int32=blocks.blocks.astype(_I32, copy=False).tobytes())


def block_lists_from_pb(
    pbs: Sequence[transfer_pb2.DestinationBlocks] | Sequence[transfer_ipc_pb2.RankBlocks], field: str
) -> tuple[RankBlocks, ...]:
    """All lists of one message. Raises WireError on malformed lengths, too many ids, or a (rank, group) named twice."""
    limited(pbs, MAX_BLOCK_LISTS, field)
    lists: list[RankBlocks] = []
    room = MAX_BLOCK_IDS
    for i, pb in enumerate(pbs):
        present(pb, "blocks", f"{field}[{i}]")
        ids = array(pb.blocks.le_int32, _I32, room, f"{field}[{i}].blocks")
        room -= len(ids)
        lists.append(RankBlocks(pb.rank, pb.layer_group, ids, pb.begin))
    if len({(one.rank, one.layer_group) for one in lists}) != len(lists):
        raise WireError(field, "names a (rank, layer group) twice")
    return tuple(lists)


def incompatibilities_to_pb(values: Iterable[Incompatibility]) -> list[errors_pb2.Incompatibility]:
    """In order."""
    return [
        errors_pb2.Incompatibility(field=one.field, mine=one.mine, yours=one.yours, remedy=one.remedy) for one in values
    ]


def incompatibilities_from_pb(pbs: Sequence[errors_pb2.Incompatibility], field: str) -> tuple[Incompatibility, ...]:
    """Raises WireError when the list or a text is too long."""
    limited(pbs, MAX_INCOMPATIBILITIES, field)
    return tuple(
        Incompatibility(text(pb.field, field), text(pb.mine, field), text(pb.yours, field), text(pb.remedy, field))
        for pb in pbs
    )


def stats_to_pb(stats: TransferStats) -> transfer_pb2.TransferStats:
    """Raises ValueError for negative durations."""
    pb = transfer_pb2.TransferStats()
    _write_stats(stats, pb)
    return pb


def _write_stats(stats: TransferStats, pb: transfer_pb2.TransferStats) -> None:
    pb.bytes, pb.descriptors, pb.path = stats.bytes, stats.descriptors, stats.path
    write_duration(stats.queue, pb.queue)
    write_duration(stats.plan, pb.plan)
    write_duration(stats.post, pb.post)
    write_duration(stats.wire, pb.wire)


def stats_from_pb(pb: transfer_pb2.TransferStats, field: str = "stats") -> TransferStats:
    """Raises WireError for negative durations."""
    return TransferStats(
        bytes=pb.bytes,
        descriptors=pb.descriptors,
        path=text(pb.path, f"{field}.path"),
        queue=seconds(pb.queue, f"{field}.queue"),
        plan=seconds(pb.plan, f"{field}.plan"),
        post=seconds(pb.post, f"{field}.post"),
        wire=seconds(pb.wire, f"{field}.wire"),
    )


def notice_to_pb(notice: TransferNotice) -> transfer_pb2.TransferNotice:
    """The reason is shortened to a size that every reader accepts.

    One for each pair of ranks and request: filled in place, which costs half of passing messages to constructors.
    """
    pb = transfer_pb2.TransferNotice(
        src_rank=notice.src_rank,
        dst_rank=notice.dst_rank,
        outcome=cast("transfer_pb2.WriterOutcome", notice.outcome.value),
        reason=notice.reason[:MAX_REASON_SENT],
        not_held=notice.not_held,
        receive=notice.receive,
    )
    _write_key(notice.key, pb.key)
    for extent in notice.extents:
        part = pb.extents.add(
            layer_group=extent.layer_group,
            view=extent.view,
            layer_begin=extent.layer_begin,
            layer_end=extent.layer_end,
        )
        part.tokens.begin, part.tokens.end = extent.tokens.begin, extent.tokens.end
    _write_stats(notice.stats, pb.stats)
    return pb


def notice_from_pb(pb: transfer_pb2.TransferNotice, field: str = "transfer_notice") -> TransferNotice:
    """Raises WireError for an unknown outcome, missing parts or extents that run backwards."""
    present(pb, "key", field)
    limited(pb.extents, MAX_EXTENTS, f"{field}.extents")
    if pb.not_held and pb.outcome != WriterOutcome.NEVER_STARTED.value:
        raise WireError(f"{field}.not_held", "true although the writer has started")
    return TransferNotice(
        key=key_from_pb(pb.key, f"{field}.key"),
        src_rank=pb.src_rank,
        dst_rank=pb.dst_rank,
        outcome=enum(WriterOutcome, pb.outcome, f"{field}.outcome"),
        extents=tuple(_extent_from_pb(extent, f"{field}.extents[{i}]") for i, extent in enumerate(pb.extents)),
        reason=text(pb.reason, f"{field}.reason"),
        stats=stats_from_pb(pb.stats, f"{field}.stats"),
        not_held=pb.not_held,
        receive=pb.receive,
    )


def _extent_from_pb(pb: transfer_pb2.DeliveredExtent, field: str) -> Extent:
    present(pb, "tokens", field)
    if pb.layer_begin >= pb.layer_end:
        raise WireError(f"{field}.layer_end", f"layers [{pb.layer_begin}, {pb.layer_end}) are empty or run backwards")
    tokens = tokens_from_pb(pb.tokens, f"{field}.tokens")
    return Extent(pb.layer_group, pb.view, tokens, pb.layer_begin, pb.layer_end)
