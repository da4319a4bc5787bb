"""common.proto and what the peer messages and the local messages share: keys, ranges, traces, blocks, notices."""

from __future__ import annotations

from functools import lru_cache
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
from kvtransfer.wire._read import (
    MAX_REASON_SENT,
    MAX_TEXT,
    array,
    enum,
    limited,
    present,
    seconds,
    text,
    write_duration,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_REQUEST_ID = 1 << 40
MAX_REQUEST_ID = 1 << 63
MAX_BLOCK_IDS = 1 << 22
MAX_BLOCK_LISTS = 1 << 12
MAX_EXTENTS = 1 << 14
MAX_INCOMPATIBILITIES = 1 << 12

_I32 = np.dtype("<i4")
_OUTCOMES = {one.value: one for one in WriterOutcome}


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
    pb = transfer_pb2.DestinationBlocks(rank=blocks.rank, layer_group=blocks.layer_group, begin=blocks.begin)
    _write_ids(blocks, pb.blocks)
    return pb


def rank_blocks_to_pb(blocks: RankBlocks) -> transfer_ipc_pb2.RankBlocks:
    """Blocks in a local message."""
    pb = transfer_ipc_pb2.RankBlocks(rank=blocks.rank, layer_group=blocks.layer_group, begin=blocks.begin)
    _write_ids(blocks, pb.blocks)
    return pb


def _write_ids(blocks: RankBlocks, pb: common_pb2.BlockIds) -> None:
    # In place, also when the list is empty: the message must be there.
    pb.SetInParent()
    pb.le_int32 = blocks.blocks.astype(_I32, copy=False).tobytes()


def block_lists_from_pb(
    pbs: Sequence[transfer_pb2.DestinationBlocks] | Sequence[transfer_ipc_pb2.RankBlocks], field: str
) -> tuple[RankBlocks, ...]:
    """All lists of one message. Raises WireError on malformed lengths, too many ids, or a (rank, group) named twice."""
    limited(pbs, MAX_BLOCK_LISTS, field)
    lists: list[RankBlocks] = []
    places: set[tuple[int, int]] = set()
    room = MAX_BLOCK_IDS
    for pb in pbs:
        data = pb.blocks.le_int32
        room -= len(data) >> 2
        # Names of fields are made only for what is refused: a request of a large instance has hundreds of lists.
        if len(data) & 3 or room < 0 or not pb.HasField("blocks"):
            at = f"{field}[{len(lists)}]"
            present(pb, "blocks", at)
            array(data, _I32, room + (len(data) >> 2), f"{at}.blocks")
        rank, group = pb.rank, pb.layer_group
        places.add((rank, group))
        lists.append(RankBlocks(rank, group, np.frombuffer(data, _I32), pb.begin))
    if len(places) != len(lists):
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


def stats_from_pb(pb: transfer_pb2.TransferStats, field: str = "stats", part: str = "") -> TransferStats:
    """Raises WireError for negative durations. The name of the message is `field` and `part`."""
    path, times = pb.path, list[float]()
    for value in (pb.queue, pb.plan, pb.post, pb.wire):
        whole, nanos = value.seconds, value.nanos
        if whole < 0 or not 0 <= nanos < 1_000_000_000:
            seconds(value, f"{field}{part}.{('queue', 'plan', 'post', 'wire')[len(times)]}")
        times.append(whole + nanos / 1e9)
    if len(path) > MAX_TEXT:
        text(path, f"{field}{part}.path")
    return TransferStats(pb.bytes, pb.descriptors, path, *times)


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
    """Raises WireError for an unknown outcome, missing parts or extents that run backwards.

    One for each pair of ranks and request: names of fields are made only for what is refused.
    """
    key, reason, extents, not_held = pb.key, pb.reason, pb.extents, pb.not_held
    outcome = _OUTCOMES.get(pb.outcome)
    if (
        outcome is None
        or len(reason) > MAX_TEXT
        or len(extents) > MAX_EXTENTS
        or not pb.HasField("key")
        or not MIN_REQUEST_ID <= key.request_id < MAX_REQUEST_ID
    ):
        present(pb, "key", field)
        key_from_pb(key, f"{field}.key")
        limited(extents, MAX_EXTENTS, f"{field}.extents")
        text(reason, f"{field}.reason")
        outcome = enum(WriterOutcome, pb.outcome, f"{field}.outcome")
    if not_held and outcome is not WriterOutcome.NEVER_STARTED:
        raise WireError(f"{field}.not_held", "true although the writer has started")
    return TransferNotice(
        RequestKey(key.request_id, key.attempt),
        pb.src_rank,
        pb.dst_rank,
        outcome,
        tuple([_extent_from_pb(extent, field, i) for i, extent in enumerate(extents)]),
        reason,
        stats_from_pb(pb.stats, field, ".stats"),
        not_held,
        pb.receive,
    )


def _extent_from_pb(pb: transfer_pb2.DeliveredExtent, field: str, number: int) -> Extent:
    tokens, layer_begin, layer_end = pb.tokens, pb.layer_begin, pb.layer_end
    begin, end = tokens.begin, tokens.end
    if begin > end or layer_begin >= layer_end or not pb.HasField("tokens"):
        at = f"{field}.extents[{number}]"
        present(pb, "tokens", at)
        tokens_from_pb(tokens, f"{at}.tokens")
        raise WireError(f"{at}.layer_end", f"layers [{layer_begin}, {layer_end}) are empty or run backwards")
    return _extent(pb.layer_group, pb.view, begin, end, layer_begin, layer_end)


@lru_cache(maxsize=1024)
def _extent(layer_group: int, view: int, begin: int, end: int, layer_begin: int, layer_end: int) -> Extent:
    """The notices of one request say much the same: its writers share the tokens and most of the layers."""
    return Extent(layer_group, view, TokenRange(begin, end), layer_begin, layer_end)
