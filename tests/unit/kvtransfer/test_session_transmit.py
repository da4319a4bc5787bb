"""The context side's machine: every way an offer can end, and what peers hear before and after."""

from __future__ import annotations

import pytest

from hub_world import key
from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.messages import ReceiveKey, ReconcileReply, TransferLimits
from kvtransfer.ports import (
    CancelWrite,
    SendOutcome,
    TransferFailure,
    TransferNotice,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.session.actions import Action, ToRank, ToScheduler
from session_sides import DONE, NEVER, OTHER, PEER, QUIESCED, TOKENS, Context, K, said


@pytest.fixture
def context() -> Context:
    return Context()


def outcomes(actions: list[Action]) -> list[SendOutcome]:
    return [one.message for one in actions if isinstance(one, ToScheduler) and isinstance(one.message, SendOutcome)]


def heard(actions: list[Action], peer=PEER) -> list[tuple[int, WriterOutcome, bool]]:
    notices = [one for one in said(actions, peer) if isinstance(one, TransferNotice)]
    return [(one.src_rank, one.outcome, one.not_held) for one in notices]


def test_one_order_per_rank_with_its_own_lists(context: Context):
    context.offer()
    orders = {one.rank: one.message for one in context.request() if isinstance(one, ToRank)}
    assert set(orders) == {0, 1}
    for rank, order in orders.items():
        assert isinstance(order, WriteOrder)
        assert [(one.rank, one.blocks.tolist()) for one in order.sources] == [(rank, [[1, 2], [3, 4]][rank])]
        assert {one.rank for one in order.destinations} == {rank}
        assert (order.instance_id, order.incarnation, order.tokens) == (*PEER, TOKENS)


def test_pages_are_freed_once_after_the_last_writer(context: Context):
    context.writing()
    first = context.notice(0)
    assert heard(first) == [(0, DONE, False)]
    assert outcomes(first) == []
    assert outcomes(context.notice(1)) == [SendOutcome(K)]
    assert context.sessions.is_idle
    assert context.notice(1) == []


def test_failed_writer_is_typed(context: Context):
    context.writing()
    context.notice(0, QUIESCED, reason="link down")
    assert outcomes(context.notice(1)) == [SendOutcome(K, TransferFailure.WRITE_FAILED, "link down")]


def test_only_the_ranks_that_are_asked_for_write(context: Context):
    context.offer()
    (order,) = context.request(ranks=(1,))
    assert isinstance(order, ToRank)
    assert order.rank == 1
    assert outcomes(context.notice(1)) == [SendOutcome(K)]


def test_request_for_nothing_ends_the_hand_off(context: Context):
    context.offer()
    assert outcomes(context.request(ranks=())) == [SendOutcome(K)]


def test_offer_expires_and_stays_expired(context: Context):
    context.offer()
    context.sessions.tick(9.9)
    assert context.take() == []
    context.sessions.tick(10.0)
    (outcome,) = outcomes(context.take())
    assert outcome.failure is TransferFailure.EXPIRED
    actions = context.request(now=11.0)
    assert heard(actions) == [(0, NEVER, True), (1, NEVER, True)]
    assert "10 s" in str(said(actions)[0])


def test_writing_does_not_expire(context: Context):
    context.writing()
    context.sessions.tick(1000.0)
    assert context.take() == []


def test_withdrawn_before_the_request(context: Context):
    context.offer()
    context.sessions.withdraw(K, 1.0)
    assert [one.failure for one in outcomes(context.take())] == [TransferFailure.CANCELLED]
    assert heard(context.request()) == [(0, NEVER, True), (1, NEVER, True)]
    context.sessions.withdraw(K, 2.0)
    assert context.take() == []


@pytest.mark.parametrize("who", ["peer", "scheduler"])
def test_cancelled_while_writing_waits_for_the_writers(context: Context, who: str):
    context.writing()
    if who == "peer":
        context.sessions.cancel(PEER, K, 1, 2.0)
    else:
        context.sessions.withdraw(K, 2.0)
    assert context.take() == [ToRank(0, CancelWrite(K, 1)), ToRank(1, CancelWrite(K, 1))]
    assert outcomes(context.notice(0, NEVER)) == []
    assert [one.failure for one in outcomes(context.notice(1, DONE))] == [TransferFailure.CANCELLED]


def test_cancel_of_an_offer_answers_for_every_writer(context: Context):
    context.offer()
    context.sessions.cancel(PEER, K, 1, 1.0)
    actions = context.take()
    assert heard(actions) == [(0, NEVER, False), (1, NEVER, False)]
    assert [one.failure for one in outcomes(actions)] == [TransferFailure.CANCELLED]


@pytest.mark.parametrize("early", ["request", "cancel", "reconcile"])
def test_what_was_answered_before_the_offer_is_never_started(context: Context, early: str):
    match early:
        case "request":
            context.request()
        case "cancel":
            context.sessions.cancel(PEER, K, 1, 1.0)
        case _:
            context.sessions.reconcile(PEER, [ReceiveKey(K, 1)], 1.0)
    context.take()
    context.offer()
    assert [one.failure for one in outcomes(context.take())] == [TransferFailure.CANCELLED]
    assert context.sessions.is_idle
    # The key may live again: a client can use an id twice.
    context.offer()
    assert len(context.request()) == 2


def test_repeated_request_gets_what_is_known_while_writers_are_open(context: Context):
    context.writing()
    context.notice(0)
    assert heard(context.request(receive=1)) == [(0, DONE, False)]
    context.notice(1, QUIESCED)
    assert heard(context.request(receive=1)) == [(0, DONE, False), (1, QUIESCED, False)]
    # After the end it names other pages: the old notices would speak of bytes that never went there.
    assert heard(context.request()) == [(0, NEVER, True), (1, NEVER, True)]


def test_memory_of_the_finished_is_bounded(context: Context):
    for number in range(10):
        context.offer(key(number))
        context.request(k=key(number))
        context.notice(0, k=key(number))
        context.notice(1, k=key(number))
    context.sessions.reconcile(PEER, [context.name(9), context.name(0)], 9.0)
    (reply,) = said(context.take(), PEER)
    assert isinstance(reply, ReconcileReply)
    told = {(one.key, one.src_rank): one.outcome for one in reply.notices}
    assert (told[key(9), 0], told[key(0), 0]) == (DONE, NEVER)


def test_pages_of_another_peer_are_not_touched(context: Context):
    context.writing()
    assert heard(context.request(OTHER), OTHER) == [(0, NEVER, True), (1, NEVER, True)]
    context.sessions.cancel(OTHER, K, 1, 2.0)
    assert [one for one in context.take() if isinstance(one, ToRank)] == []
    context.notice(0)
    assert outcomes(context.notice(1)) == [SendOutcome(K)]
    assert heard(context.request(OTHER), OTHER) == [(0, NEVER, True), (1, NEVER, True)]


def test_reconcile_tells_every_attempt_apart(context: Context):
    for number in (1, 2, 3, 4):
        context.offer(key(number))
    for number in (1, 2):
        context.request(k=key(number))
    context.notice(0, k=key(1))
    context.notice(1, k=key(1))
    context.notice(0, k=key(2))
    context.sessions.reconcile(
        PEER, [context.name(n) for n in (1, 2)] + [ReceiveKey(key(3), 8), ReceiveKey(key(9), 9)], 3.0
    )
    actions = context.take()
    (reply,) = said(actions)
    assert isinstance(reply, ReconcileReply)
    assert reply.in_flight == (context.name(2),)
    told = {(one.key, one.src_rank): one.outcome for one in reply.notices}
    assert told == {
        (key(1), 0): DONE,
        (key(1), 1): DONE,
        (key(2), 0): DONE,
        (key(3), 0): NEVER,
        (key(3), 1): NEVER,
        (key(9), 0): NEVER,
        (key(9), 1): NEVER,
    }
    # The request of 3 was lost and will not be served when it comes late; its pages wait for the next one.
    assert outcomes(actions) == []
    assert {view.key for view in context.sessions.views(4.0)} == {key(2), key(3), key(4)}
    assert [one for one in context.request(k=key(3), receive=8) if isinstance(one, ToRank)] == []
    assert len([one for one in context.request(k=key(3), receive=10) if isinstance(one, ToRank)]) == 2


def test_exited_rank_is_over_after_the_fabric_has_drained(context: Context):
    context.writing()
    context.offer(key(2))
    context.sessions.rank_exited(0, "signal 9", 5.0)
    assert [one.key for one in outcomes(context.take())] == [key(2)]
    context.sessions.tick(5.9)
    assert context.take() == []
    context.sessions.tick(6.0)
    assert heard(context.take()) == [(0, QUIESCED, False)]
    (outcome,) = outcomes(context.notice(1))
    assert outcome.failure is TransferFailure.WRITE_FAILED
    assert "signal 9" in outcome.reason


def test_request_for_an_exited_rank_is_refused_at_once(context: Context):
    context.sessions.rank_exited(1, "signal 9", 0.0)
    context.offer()
    actions = context.request()
    assert heard(actions) == [(0, NEVER, False), (1, NEVER, False)]
    assert [one.failure for one in outcomes(actions)] == [TransferFailure.WRITE_FAILED]


def test_lost_order_is_never_started(context: Context):
    context.offer()
    lost = next(one for one in context.request() if isinstance(one, ToRank))
    assert isinstance(lost.message, WriteOrder)
    context.sessions.order_lost(0, lost.message, 2.0)
    assert heard(context.take()) == [(0, NEVER, False)]
    assert [one.failure for one in outcomes(context.notice(1))] == [TransferFailure.WRITE_FAILED]


def test_limits_hold():
    context = Context(TransferLimits(max_open_requests=1, max_block_ids=4))
    context.writing()
    context.offer(key(2))
    actions = context.request(k=key(2))
    assert heard(actions) == [(0, NEVER, False), (1, NEVER, False)]
    with pytest.raises(ProtocolError, match="at most 1"):
        context.sessions.reconcile(PEER, [context.name(1), context.name(2)], 2.0)


def test_nonsense_is_refused(context: Context):
    context.offer()
    with pytest.raises(ProtocolError, match=r"\[7\]"):
        context.request(ranks=(7,))
    with pytest.raises(TransferStateError, match="offered already"):
        context.offer()
    context.request()
    # A rank can only speak for itself.
    context.sessions.notice(0, TransferNotice(K, 1, 1, DONE, receive=2), 2.0)
    assert context.take() == []
