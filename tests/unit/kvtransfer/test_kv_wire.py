"""Everything survives the wire."""

from __future__ import annotations

import pytest
from isthmus.v1 import kv_transfer_service_pb2, transfer_ipc_pb2, transfer_pb2

from kvtransfer import wire
from kvtransfer.errors import WireError
from kvtransfer.messages import (
    Envelope,
    FenceAnswer,
    FenceWriter,
    KvRequest,
    ReceiveKey,
    SessionView,
)
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    Bound,
    CancelTransfer,
    CancelWrite,
    FirstTokensArrived,
    ForgetPeer,
    HandoffStats,
    Holder,
    LoadPeer,
    PeerLoaded,
    RankReady,
    ReceiveIntent,
    ReceiveOutcome,
    ReceiveRequest,
    SendFirstTokens,
    SendOffer,
    SendOutcome,
    TokenRange,
    TransferFailure,
    WriteOrder,
)
from kvtransfer.rank_info import InstanceRole
from wire_samples import BLOCKS, BODIES, INSTANCE, KEY, NOTICE, OTHER_ID, REASON, SOME_ID, TRACE, same_blocks


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_peer_messages_survive(body):
    envelope = Envelope(SOME_ID, b"", (body, body))
    data = wire.envelope_to_request(envelope).SerializeToString()
    assert wire.envelope_from_request_bytes(data) == envelope
    response = kv_transfer_service_pb2.ConnectResponse.FromString(
        wire.envelope_to_response(Envelope(SOME_ID, OTHER_ID, (body,))).SerializeToString()
    )
    assert wire.envelope_from_pb(response) == Envelope(SOME_ID, OTHER_ID, (body,))


@pytest.mark.parametrize("trace", [None, TRACE])
def test_kv_requests_survive(trace):
    request = KvRequest(KEY, TokenRange(16, 99), BLOCKS, trace, 5, may_retry=True)
    data = wire.peer_message_to_pb(request).SerializeToString()
    (back,) = wire.peer_bodies_from_pb(transfer_pb2.PeerMessage.FromString(data))
    assert isinstance(back, KvRequest)
    assert (back.key, back.tokens, back.trace, back.receive, back.may_retry) == (KEY, request.tokens, trace, 5, True)
    assert same_blocks(back.destinations, BLOCKS)


def test_scheduler_messages_survive():
    offer = wire.send_offer_from_pb(wire.send_offer_to_pb(SendOffer(KEY, TokenRange(0, 9), BLOCKS, 2, more=True)))
    assert (offer.key, offer.tokens, offer.chunk, offer.more) == (KEY, TokenRange(0, 9), 2, True)
    assert same_blocks(offer.sources, BLOCKS)
    request = ReceiveRequest(KEY, TokenRange(0, 9), BLOCKS, Holder("h:1", "context-0", SOME_ID), TRACE)
    back = wire.receive_request_from_pb(wire.receive_request_to_pb(request))
    assert (back.key, back.tokens, back.holder, back.trace) == (KEY, TokenRange(0, 9), request.holder, TRACE)
    assert same_blocks(back.destinations, BLOCKS)
    assert wire.cancel_transfer_from_pb(wire.cancel_transfer_to_pb(CancelTransfer(KEY))) == CancelTransfer(KEY)
    for outcome in (SendOutcome(KEY), SendOutcome(KEY, TransferFailure.EXPIRED, "late")):
        assert wire.send_outcome_from_pb(wire.send_outcome_to_pb(outcome)) == outcome
    stats = HandoffStats(NOTICE.stats, 3.5)
    for outcome in (
        ReceiveOutcome(KEY, True, stats=stats),
        ReceiveOutcome(KEY, False, TransferFailure.PEER_LOST, "gone"),
        ReceiveOutcome(KEY, True, TransferFailure.WRITE_FAILED, "link", may_retry=True),
    ):
        assert wire.receive_outcome_from_pb(wire.receive_outcome_to_pb(outcome)) == outcome


def test_bindings_of_the_scheduler_survive():
    intent = ReceiveIntent(KEY, Holder("h:1", "context-0", SOME_ID), TRACE)
    assert wire.receive_intent_from_pb(wire.receive_intent_to_pb(intent)) == intent
    assert wire.bind_context_from_pb(wire.bind_context_to_pb(BindContext(KEY, 3))) == BindContext(KEY, 3)
    first = SendFirstTokens(KEY, b"opaque")
    assert wire.send_first_tokens_from_pb(wire.send_first_tokens_to_pb(first)) == first
    for news in (Bound(KEY, 0), FirstTokensArrived(KEY, b""), BindFailed(KEY, TransferFailure.TIMED_OUT, "late")):
        assert wire.bind_news_from_pb(wire.bind_news_to_pb(news)) == news
    with pytest.raises(WireError, match="news"):
        wire.bind_news_from_pb(transfer_ipc_pb2.BindNews(key=wire.key_to_pb(KEY)))


def test_fence_calls_survive():
    fence = FenceWriter((ReceiveKey(KEY, 1),), "silent")
    assert wire.fence_request_from_pb(wire.fence_request_to_pb(SOME_ID, ("g", OTHER_ID), fence)) == (
        SOME_ID,
        ("g", OTHER_ID),
        fence,
    )
    answer = FenceAnswer(SOME_ID, (OTHER_ID,), (1,), (NOTICE,))
    assert wire.fence_answer_from_pb(wire.fence_answer_to_pb(answer)) == answer


def test_rank_frames_survive():
    order = WriteOrder(KEY, "generation-0", SOME_ID, TokenRange(0, 9), BLOCKS, BLOCKS, 4, TokenRange(3, 5))
    commands = (
        LoadPeer(INSTANCE),
        LoadPeer(INSTANCE, INSTANCE.ranks),
        ForgetPeer("generation-0", SOME_ID),
        CancelWrite(KEY, 9),
    )
    assert wire.rank_input_from_bytes(wire.rank_input_to_bytes(commands)) == commands
    (back,) = wire.rank_input_from_bytes(wire.rank_input_to_bytes([order]))
    assert isinstance(back, WriteOrder)
    assert (back.key, back.instance_id, back.incarnation, back.tokens) == (KEY, "generation-0", SOME_ID, order.tokens)
    assert same_blocks(back.sources, BLOCKS)
    assert same_blocks(back.destinations, BLOCKS)
    events = (
        RankReady(INSTANCE.ranks[1]),
        PeerLoaded("generation-0", SOME_ID, (), b"d" * 16),
        PeerLoaded("generation-0", SOME_ID, (REASON,)),
        NOTICE,
    )
    assert wire.rank_output_from_bytes(wire.rank_output_to_bytes(events)) == events


def test_sessions_survive():
    view = SessionView(KEY, InstanceRole.CONTEXT, "offered", "", 1.5, 12, True)
    assert wire.session_view_from_pb(wire.session_view_to_pb(view)) == view


def test_block_lists_are_views_not_copies():
    pb = wire.peer_message_to_pb(KvRequest(KEY, TokenRange(0, 4), BLOCKS, receive=1)).kv_request
    (request,) = wire.peer_bodies_from_pb(transfer_pb2.PeerMessage(kv_request=pb))
    assert isinstance(request, KvRequest)
    assert not request.destinations[0].blocks.flags.writeable
