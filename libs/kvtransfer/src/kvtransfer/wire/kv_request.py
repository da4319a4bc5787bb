"""KvRequest of transfer.proto: what every hand-off says first.

A message finds the caches of the processor cold, so what counts is how much code it touches: what nearly every request
says is written and read by one function each, everything else, and whatever is wrong, by the general ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import WireError
from kvtransfer.messages import KvRequest
from kvtransfer.ports import RankBlocks, RequestKey, TokenRange
from kvtransfer.wire._read import present
from kvtransfer.wire.block_lists import (
    I32,
    MAX_BLOCK_IDS,
    PLACE,
    block_lists_from_pb,
    write_block_lists,
    write_one_list,
)
from kvtransfer.wire.common import (
    MAX_REQUEST_ID,
    MIN_REQUEST_ID,
    key_from_pb,
    local_id,
    tokens_from_pb,
    trace_from_pb,
)

if TYPE_CHECKING:
    from isthmus.v1 import transfer_pb2


def write_kv_request(request: KvRequest, pb: transfer_pb2.KvRequest) -> None:
    """Into a field of a message. Raises ValueError for a local request id."""
    key, tokens, destinations, trace, receive, may_retry, src_dp = request
    if not MIN_REQUEST_ID <= key[0] < MAX_REQUEST_ID:
        raise local_id(key[0])
    named, wanted = pb.key, pb.tokens
    named.request_id, named.attempt = key
    wanted.SetInParent()
    wanted.begin, wanted.end = tokens.begin, tokens.end
    if len(destinations) == 1:
        write_one_list(destinations[0], pb.destinations)
    else:
        write_block_lists(destinations, pb.destinations)
    pb.receive = receive
    # What is left out is read as this.
    if may_retry:
        pb.may_retry = True
    if src_dp:
        pb.src_dp = src_dp
    if trace is not None:
        into = pb.trace
        into.trace_id, into.span_id, into.flags = trace.trace_id, trace.span_id, trace.flags


def kv_request_from_pb(pb: transfer_pb2.KvRequest) -> KvRequest:
    """Raises WireError naming the field."""
    key, tokens, lists, receive = pb.key, pb.tokens, pb.destinations, pb.receive
    request_id, begin, end = key.request_id, tokens.begin, tokens.end
    places, ids = lists.le_uint32, lists.le_int32
    if lists.count != 1 or len(places) != PLACE.size or len(ids) > MAX_BLOCK_IDS * 4:
        return _kv_request_from_pb(pb)
    rank, group, first, length = PLACE.unpack(places)
    fits = MIN_REQUEST_ID <= request_id < MAX_REQUEST_ID and begin <= end and length * 4 == len(ids)
    if not fits or not receive or not pb.HasField("tokens"):
        return _kv_request_from_pb(pb)
    return KvRequest(
        RequestKey(request_id, key.attempt),
        TokenRange(begin, end),
        (RankBlocks(rank, group, np.frombuffer(ids, I32), first),),
        trace_from_pb(pb.trace, "kv_request.trace") if pb.HasField("trace") else None,
        receive,
        pb.may_retry,
        pb.src_dp,
    )


def _kv_request_from_pb(pb: transfer_pb2.KvRequest) -> KvRequest:
    """Any number of lists, or something is wrong."""
    # A key that is not there has no id that is accepted.
    key = key_from_pb(pb.key, "kv_request.key")
    present(pb, "tokens", "kv_request")
    if pb.receive == 0:
        raise WireError("kv_request.receive", "0 or missing: receives are numbered from 1 on")
    return KvRequest(
        key,
        tokens_from_pb(pb.tokens, "kv_request.tokens"),
        block_lists_from_pb(pb.destinations, "kv_request.destinations"),
        trace_from_pb(pb.trace, "kv_request.trace") if pb.HasField("trace") else None,
        pb.receive,
        pb.may_retry,
        pb.src_dp,
    )
