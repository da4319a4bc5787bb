"""KvRequest of transfer.proto: what every hand-off says first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.errors import WireError
from kvtransfer.messages import KvRequest
from kvtransfer.wire._read import present
from kvtransfer.wire.block_lists import block_lists_from_pb, write_block_lists
from kvtransfer.wire.common import key_from_pb, tokens_from_pb, trace_from_pb, write_key, write_tokens

if TYPE_CHECKING:
    from isthmus.v1 import transfer_pb2


def write_kv_request(request: KvRequest, pb: transfer_pb2.KvRequest) -> None:
    """Into a field of a message. Raises ValueError for a local request id."""
    key, tokens, destinations, trace, receive, may_retry, src_dp = request
    write_key(key, pb.key)
    write_tokens(tokens, pb.tokens)
    write_block_lists(destinations, pb.destinations)
    pb.receive = receive
    # What is left out is read as this.
    if may_retry:
        pb.may_retry = True
    if src_dp:
        pb.src_dp = src_dp
    if trace is not None:
        pb.trace.trace_id, pb.trace.span_id, pb.trace.flags = trace.trace_id, trace.span_id, trace.flags


def kv_request_from_pb(pb: transfer_pb2.KvRequest) -> KvRequest:
    """Raises WireError naming the field."""
    # A key that is not there has no id that is accepted.
    receive, key = pb.receive, key_from_pb(pb.key, "kv_request.key")
    present(pb, "tokens", "kv_request")
    if receive == 0:
        raise WireError("kv_request.receive", "0 or missing: receives are numbered from 1 on")
    return KvRequest(
        key,
        tokens_from_pb(pb.tokens, "kv_request.tokens"),
        block_lists_from_pb(pb.destinations, "kv_request.destinations"),
        trace_from_pb(pb.trace, "kv_request.trace") if pb.HasField("trace") else None,
        receive,
        pb.may_retry,
        pb.src_dp,
    )
