"""Bytes of schema v1 as a release has sent them: this build reads them, and says the same in the same bytes.

After a deliberate change before the first release: `python tests/contract/test_contract_golden.py` writes them again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from isthmus.v1 import kv_transfer_service_pb2

from kvtransfer import wire
from kvtransfer.errors import WireError
from kvtransfer.messages import (
    Bind,
    Cancel,
    Capability,
    Envelope,
    ExitReport,
    FenceWriter,
    FirstTokens,
    Goodbye,
    Hello,
    KvIntent,
    KvRequest,
    NotBound,
    PeerBody,
    Ping,
    Pong,
    ReceiveKey,
    Reconcile,
    ReconcileReply,
    Reject,
    TransferLimits,
    Welcome,
)
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
from kvtransfer.rank_info import AgentDescriptor, InstanceInfo, InstanceRole, ModelFingerprint, RankInfo, Topology

GOLDEN = Path(__file__).with_name("golden_transfer_v1.json")
HERE, THERE = bytes(range(16)), bytes(range(16, 32))
KEY = RequestKey((1 << 40) + 5, 2)


def _instance() -> InstanceInfo:
    entries = BufferEntries(np.array([0, 1], np.uint32), np.array([0, 256], np.uint64), np.array([256, 256], np.uint32))
    view = PoolView(frozenset({"k"}), MapperKind.NHD, 0, entries, HeadInterval(0, 2))
    table = PageTable(
        (RegisteredRegion(4096, 8192, MemoryKind.DRAM),),
        (PhysicalPool(4096, 512, 8),),
        (AttentionGroup((3, 4), 4, (view,)),),
    )
    rank = RankInfo(0, Topology(), table, AgentDescriptor("nixl", "host:1:a", b"metadata"))
    model = ModelFingerprint(b"w" * 16, b"a" * 16, "BF16")
    return InstanceInfo("generation-0", HERE, "10.0.0.1:9", InstanceRole.GENERATION, model, (rank,), (THERE,))


def bodies() -> dict[str, PeerBody]:
    """One of each kind, every field set."""
    limits, both = TransferLimits(8, 64), frozenset(Capability)
    receive, trace = ReceiveKey(KEY, 9), TraceContext(HERE, HERE[:8], 1)
    notice = TransferNotice(
        KEY,
        1,
        2,
        WriterOutcome.DELIVERED,
        (Extent(0, 1, TokenRange(4, 70), 3, 9),),
        "because",
        TransferStats(123, 4, "nixl/ucx", 0.5, 0.25, 0.125, 2.0),
        receive=9,
    )
    refused = TransferNotice(KEY, 0, 0, WriterOutcome.NEVER_STARTED, (), "expired", not_held=True, receive=9)
    blocks = (RankBlocks(1, 0, np.array([5, -1, 7], np.int32)),)
    every: list[PeerBody] = [
        Hello(1, 1, both, limits, ("packed",), _instance(), 3, "cma"),
        Welcome(1, both, limits, _instance(), THERE, 3),
        Reject((Incompatibility("field", "a", "b", "make them equal"),)),
        KvRequest(KEY, TokenRange(0, 12), blocks, trace, 9, may_retry=True, src_dp=3),
        notice,
        Cancel(KEY, 9),
        Reconcile((receive,)),
        ReconcileReply((receive,), (refused,)),
        FenceWriter((receive,), "silent"),
        ExitReport((0, 3), "signal 9"),
        Goodbye("asked to stop"),
        KvIntent(KEY, trace),
        Bind(KEY, 2),
        NotBound(KEY, "aborted"),
        FirstTokens(KEY, b"opaque"),
        Ping(7),
        Pong(7),
    ]
    return {type(one).__name__: one for one in every}


def said(body: PeerBody) -> bytes:
    return wire.envelope_to_request(Envelope(HERE, THERE, (body,))).SerializeToString(deterministic=True)


NAMES = sorted(bodies())


def test_every_kind_of_message_is_recorded():
    assert sorted(json.loads(GOLDEN.read_text())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_recorded_bytes_mean_the_same_and_are_said_the_same(name: str):
    recorded = bytes.fromhex(json.loads(GOLDEN.read_text())[name])
    envelope = wire.envelope_from_request_bytes(recorded)
    assert (envelope.src_incarnation, envelope.dst_incarnation) == (HERE, THERE)
    (body,) = envelope.messages
    assert said(body) == recorded
    assert said(bodies()[name]) == recorded


@pytest.mark.parametrize("name", NAMES)
def test_fields_of_a_newer_peer_are_tolerated(name: str):
    """Field 2000 of the message itself and of the envelope, as a later schema might add them."""
    pb = kv_transfer_service_pb2.ConnectRequest.FromString(bytes.fromhex(json.loads(GOLDEN.read_text())[name]))
    (message,) = pb.messages
    inner = getattr(message, str(message.WhichOneof("body")))
    unknown = b"\x82\x7d\x03abc"
    inner.MergeFromString(unknown)
    newer = pb.SerializeToString() + unknown
    (body,) = wire.envelope_from_request_bytes(newer).messages
    assert said(body) == said(bodies()[name])


def test_kinds_of_a_newer_peer_are_never_skipped():
    pb = kv_transfer_service_pb2.ConnectRequest(src_incarnation=HERE)
    pb.messages.add().MergeFromString(b"\x82\x7d\x03abc")
    with pytest.raises(WireError, match="body"):
        wire.envelope_from_pb(pb)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: said(body).hex() for name, body in bodies().items()}, indent=1) + "\n")
