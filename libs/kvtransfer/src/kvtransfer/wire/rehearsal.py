"""What every hand-off says, written and read before the first one says it."""

from __future__ import annotations

import numpy as np
from isthmus.v1 import kv_transfer_service_pb2

from kvtransfer.messages import Envelope, KvRequest
from kvtransfer.ports import (
    Extent,
    RankBlocks,
    RequestKey,
    TokenRange,
    TransferNotice,
    TransferStats,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import INCARNATION_BYTES
from kvtransfer.wire._read import parse
from kvtransfer.wire.common import MIN_REQUEST_ID
from kvtransfer.wire.envelope import (
    envelope_from_pb,
    envelope_from_request_bytes,
    envelope_to_request,
    envelope_to_response,
)
from kvtransfer.wire.rank import (
    rank_input_from_bytes,
    rank_input_to_bytes,
    rank_output_from_bytes,
    rank_output_to_bytes,
)

# The interpreter rewrites code that has run a few times; protobuf makes its classes ready at their first use.
_TIMES = 16


def rehearse() -> None:
    """Converts one request, its order and its notice there and back, as the processes of both sides do. Takes about a
    millisecond; the first hand-off of a pair would otherwise wait for a part of it."""
    key, tokens, somebody = RequestKey(MIN_REQUEST_ID), TokenRange(0, 1), bytes(INCARNATION_BYTES)
    blocks = (RankBlocks(0, 0, np.zeros(1, np.int32)),)
    request = Envelope(somebody, somebody, (KvRequest(key, tokens, blocks, receive=1),))
    order = WriteOrder(key, "nobody", somebody, tokens, blocks, blocks, receive=1)
    delivered, stats = (Extent(0, 0, tokens, 0, 1),), TransferStats(bytes=1, descriptors=1, path="none")
    notice = TransferNotice(key, 0, 0, WriterOutcome.DELIVERED, delivered, stats=stats, receive=1)
    answer = Envelope(somebody, somebody, (notice,))
    for _ in range(_TIMES):
        envelope_from_request_bytes(envelope_to_request(request).SerializeToString())
        rank_input_from_bytes(rank_input_to_bytes((order,)))
        rank_output_from_bytes(rank_output_to_bytes((notice,)))
        data = envelope_to_response(answer).SerializeToString()
        envelope_from_pb(parse(kv_transfer_service_pb2.ConnectResponse, data, "envelope"))
