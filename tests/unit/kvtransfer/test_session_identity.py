"""A KvRequest is known by its number: late copies, late cancels and old answers change nothing; chunks, retries."""

from __future__ import annotations

import pytest

from hub_world import blocks
from kvtransfer.errors import TransferStateError
from kvtransfer.messages import Cancel, KvRequest, ReceiveKey, ReconcileReply
from kvtransfer.ports import (
    CancelWrite,
    ReceiveOutcome,
    SendOffer,
    SendOutcome,
    TokenRange,
    TransferFailure,
    TransferNotice,
    WriteOrder,
)
from kvtransfer.session.actions import Action, ToRank, ToScheduler
from session_sides import DONE, HOLDER_ID, NEVER, PEER, QUIESCED, Context, Generation, K, said


def orders(actions: list[Action]) -> list[WriteOrder]:
    return [one.message for one in actions if isinstance(one, ToRank) and isinstance(one.message, WriteOrder)]


def ends(actions: list[Action]) -> list[TransferFailure]:
    return [one.message.failure for one in actions if isinstance(one, ToScheduler)]


# --- the context side


def test_late_copy_of_a_refused_request_is_never_started():
    context = Context()
    context.sessions.reconcile(PEER, [ReceiveKey(K, 5)], 0.0)
    context.sessions.offer(SendOffer(K, TokenRange(0, 8), ()), 0.0)
    context.take()
    context.offer()
    assert orders(context.request(receive=4)) == []
    assert orders(context.request(receive=5)) == []
    assert len(orders(context.request(receive=6))) == 2


def test_late_cancel_of_an_earlier_receive_changes_nothing():
    context = Context()
    context.offer()
    context.request(retry=True)
    context.notice(0, QUIESCED)
    context.notice(1, QUIESCED)
    context.request(retry=True)
    context.sessions.cancel(PEER, K, 1, 3.0)
    assert [one for one in context.take() if isinstance(one, ToRank)] == []
    context.notice(0)
    assert ends(context.notice(1)) == [TransferFailure.NONE]


def test_late_notice_of_a_rank_about_an_earlier_receive_changes_nothing():
    context = Context()
    context.offer()
    context.request(retry=True)
    context.notice(0, QUIESCED)
    context.notice(1, QUIESCED)
    context.request()
    context.sessions.notice(0, TransferNotice(K, 0, 0, DONE, receive=1), 3.0)
    assert context.take() == []
    context.notice(0)
    assert ends(context.notice(1)) == [TransferFailure.NONE]


def test_failed_write_keeps_the_pages_for_one_more_request():
    context = Context()
    context.offer()
    context.request(retry=True)
    context.notice(0)
    assert ends(context.notice(1, QUIESCED)) == []
    assert [view.state for view in context.sessions.views(2.0)] == ["offered"]
    assert len(orders(context.request(receive=2))) == 2
    context.notice(0)
    assert ends(context.notice(1, QUIESCED)) == [TransferFailure.WRITE_FAILED]


def test_pages_kept_for_a_retry_are_given_up_by_cancel_or_time():
    for end in ("cancel", "time"):
        context = Context()
        context.offer()
        context.request(retry=True, now=1.0)
        context.notice(0, QUIESCED)
        context.notice(1, QUIESCED, now=20.0)
        if end == "cancel":
            context.sessions.cancel(PEER, K, 1, 21.0)
        else:
            context.sessions.tick(29.9)
            assert context.take() == []
            context.sessions.tick(30.0)
        assert ends(context.take()) == [TransferFailure.CANCELLED if end == "cancel" else TransferFailure.EXPIRED]
        assert context.sessions.is_idle


# --- chunks


def chunk(context: Context, number: int, begin: int, end: int, more: bool = True, now: float = 1.0) -> list[Action]:
    pages = tuple(range(1, 2 + (end - 1) // 4))
    offer = SendOffer(K, TokenRange(begin, end), blocks(*pages) + blocks(*pages, rank=1), number, more)
    context.sessions.offer(offer, now)
    return context.take()


def test_chunks_are_ordered_as_they_come_and_each_writer_says_one_word():
    context = Context()
    assert chunk(context, 0, 0, 4) == []
    assert [one.window for one in orders(context.request())] == [TokenRange(0, 4)] * 2
    assert context.notice(0) == []
    assert [one.window for one in orders(chunk(context, 1, 4, 8, more=False))] == [TokenRange(4, 8)] * 2
    (word,) = said(context.notice(0))
    assert isinstance(word, TransferNotice)
    assert word.outcome is DONE
    assert context.notice(1) == []
    assert ends(context.notice(1)) == [TransferFailure.NONE]


def test_extents_of_all_chunks_are_in_the_last_word():
    from kvtransfer.ports import Extent, TransferStats

    context = Context()
    chunk(context, 0, 0, 4)
    context.request(ranks=(0,))
    chunk(context, 1, 4, 8, more=False)
    parts = [Extent(0, 0, TokenRange(0, 4), 0, 3), Extent(0, 0, TokenRange(4, 8), 0, 3)]
    for part in parts:
        context.sessions.notice(0, TransferNotice(K, 0, 0, DONE, (part,), "", TransferStats(7), receive=1), 2.0)
    (word,) = said(context.take())
    assert isinstance(word, TransferNotice)
    assert word.extents == tuple(parts)
    assert word.stats.bytes == 14


def test_cancel_between_chunks_orders_nothing_more():
    context = Context()
    chunk(context, 0, 0, 4)
    context.request()
    context.sessions.cancel(PEER, K, 1, 2.0)
    assert [one.message for one in context.take() if isinstance(one, ToRank)] == [CancelWrite(K, 1)] * 2
    assert orders(chunk(context, 1, 4, 8)) == []
    context.notice(0, NEVER)
    assert ends(context.notice(1, DONE)) == [TransferFailure.CANCELLED]
    # The scheduler may have sent the next one before it heard.
    assert chunk(context, 2, 8, 12) == []
    assert context.sessions.is_idle


def test_withdrawn_between_chunks_is_no_delivery():
    context = Context()
    chunk(context, 0, 0, 4)
    context.request(ranks=(0,))
    context.sessions.withdraw(K, 2.0)
    chunk(context, 1, 4, 8, more=False)
    (word,) = said(actions := context.notice(0, DONE))
    assert isinstance(word, TransferNotice)
    assert word.outcome is QUIESCED
    assert ends(actions) == [TransferFailure.CANCELLED]


def test_one_failed_chunk_fails_the_writer():
    context = Context()
    chunk(context, 0, 0, 4)
    context.request(ranks=(0,))
    chunk(context, 1, 4, 8, more=False)
    context.notice(0, DONE)
    (word,) = said(actions := context.notice(0, NEVER, reason="no route"))
    assert isinstance(word, TransferNotice)
    assert (word.outcome, word.reason) == (QUIESCED, "no route")
    assert ends(actions) == [TransferFailure.WRITE_FAILED]


def test_hold_counts_from_the_last_chunk():
    context = Context()
    chunk(context, 0, 0, 4, now=0.0)
    context.sessions.tick(1000.0)
    assert context.take() == []
    chunk(context, 1, 4, 8, more=False, now=1000.0)
    context.sessions.tick(1009.9)
    assert context.take() == []
    context.sessions.tick(1010.0)
    assert ends(context.take()) == [TransferFailure.EXPIRED]


def test_chunks_out_of_order_are_refused():
    context = Context()
    chunk(context, 0, 0, 4)
    with pytest.raises(TransferStateError, match="chunk 2 of group 0 comes after 1 of"):
        chunk(context, 2, 8, 12)


def test_first_chunk_of_a_bound_attempt_that_has_ended_is_no_new_offer():
    context = Context()
    context.sessions.prepare(K, 0.0)
    context.sessions.withdraw(K, 0.0)
    context.take()
    assert chunk(context, 1, 0, 4) == []
    assert context.sessions.is_idle


# --- the generation side


def test_each_receive_has_its_own_number():
    generation = Generation()
    (first,) = said(generation.ask())
    generation.notice(0)
    generation.notice(1)
    (second,) = said(generation.ask())
    assert isinstance(first, KvRequest)
    assert isinstance(second, KvRequest)
    assert first.receive < second.receive
    # What was delivered for the first lies in pages that have been freed since.
    assert generation.notice(0, receive=first.receive) == []
    assert generation.ledger.waiting_for(K) == ((0, 0), (1, 1))


def outcome(actions: list[Action]) -> ReceiveOutcome:
    (message,) = [one.message for one in actions if isinstance(one, ToScheduler)]
    assert isinstance(message, ReceiveOutcome)
    return message


def test_receive_that_may_be_repeated_waits_for_every_writer_and_says_so():
    generation = Generation()
    generation.ask(retry=True)
    assert generation.notice(0, QUIESCED, reason="link down") == []
    actions = generation.notice(1)
    assert said(actions) == []
    ended = outcome(actions)
    assert (ended.settled, ended.failure, ended.may_retry) == (True, TransferFailure.WRITE_FAILED, True)
    assert len(said(generation.ask(ids=(3, 4)))) == 1


def test_retry_that_is_not_taken_up_lets_the_holder_free_its_pages():
    generation = Generation()
    generation.ask(retry=True)
    generation.notice(0, QUIESCED)
    generation.notice(1)
    generation.sessions.withdraw(K, 2.0)
    assert said(generation.take()) == [Cancel(K, 1)]
    generation.sessions.withdraw(K, 2.0)
    assert generation.take() == []


def test_pages_that_are_not_held_can_not_be_asked_for_again():
    generation = Generation()
    generation.ask(retry=True)
    generation.notice(0, NEVER, not_held=True)
    ended = outcome(generation.notice(1, NEVER, not_held=True))
    assert (ended.failure, ended.may_retry) == (TransferFailure.NOT_HELD, False)


def test_request_lost_with_its_stream_is_settled_and_the_holder_told():
    generation = Generation()
    generation.ask()
    generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 2.0)
    generation.take()
    lost = tuple(TransferNotice(K, rank, rank, NEVER, reason="lost", receive=1) for rank in (0, 1))
    generation.sessions.reconciled(HOLDER_ID, ReconcileReply((), lost), 3.0)
    actions = generation.take()
    assert outcome([one for one in actions if isinstance(one, ToScheduler)][-1:]).settled
    assert said(actions)[-1] == Cancel(K, 1)


def test_send_outcomes_are_said_once():
    context = Context()
    context.offer()
    context.request()
    context.notice(0)
    (over,) = [one.message for one in context.notice(1) if isinstance(one, ToScheduler)]
    assert over == SendOutcome(K)
    assert context.notice(1) == []


def test_holder_hears_of_a_cancel_that_came_before_the_stream():
    generation = Generation(ready=False)
    generation.ask()
    generation.sessions.withdraw(K, 1.0)
    assert said(generation.take()) == []
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 2.0)
    assert said(generation.take()) == [Cancel(K, 0)]
    generation.sessions.stream_broke(HOLDER_ID, 3.0)
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 4.0)
    assert said(generation.take()) == []


def test_cancel_that_is_owed_is_forgiven_when_the_key_comes_again():
    generation = Generation(ready=False)
    generation.ask()
    generation.sessions.withdraw(K, 1.0)
    generation.ask()
    generation.take()
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 2.0)
    assert [type(one) for one in said(generation.take())] == [KvRequest]
