"""The generation side's machine: pages are given back exactly once, and never while a writer may touch them."""

from __future__ import annotations

import numpy as np
import pytest

from hub_world import key
from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.ledger import PageState
from kvtransfer.messages import Cancel, KvRequest, ReceiveKey, Reconcile, ReconcileReply, TransferLimits
from kvtransfer.ports import (
    Extent,
    ReceiveOutcome,
    RequestKey,
    TokenRange,
    TransferFailure,
    TransferNotice,
    TransferStats,
)
from kvtransfer.session.actions import Action, ToPeer, ToScheduler
from session_sides import DONE, HOLDER_ID, NEVER, PLANS, QUIESCED, Generation, K, said


@pytest.fixture
def generation() -> Generation:
    return Generation()


def outcomes(actions: list[Action]) -> list[tuple[bool, TransferFailure]]:
    messages = [one.message for one in actions if isinstance(one, ToScheduler)]
    return [(one.settled, one.failure) for one in messages if isinstance(one, ReceiveOutcome)]


SUCCESS = (True, TransferFailure.NONE)


def test_whole_cache_is_reported_after_the_last_writer(generation: Generation):
    (asked,) = said(generation.ask())
    assert isinstance(asked, KvRequest)
    assert generation.ledger.held()[PageState.EXPOSED] == 4
    assert generation.notice(0, stats=TransferStats(bytes=5, descriptors=2, path="p", wire=0.5)) == []
    actions = generation.notice(1, now=3.0, stats=TransferStats(bytes=7, descriptors=1, path="p", wire=0.25))
    assert outcomes(actions) == [SUCCESS]
    stats = actions[0].message.stats
    assert stats is not None
    assert stats.writers == TransferStats(bytes=12, descriptors=3, path="p", wire=0.5)
    assert stats.total == 3.0
    assert generation.sessions.is_idle
    assert generation.ledger.is_empty
    assert generation.notice(1) == []


def test_pages_are_in_the_ledger_before_the_request_escapes():
    seen: list[PageState | None] = []
    generation = Generation(ready=False)
    generation.sessions._emit = lambda action: seen.append(generation.ledger.state(K))
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 0.0)
    generation.ask()
    assert seen == [PageState.EXPOSED]


def test_nothing_needed_needs_no_writer_but_tells_the_holder(generation: Generation):
    actions = generation.ask(ids=(), tokens=0)
    assert isinstance(said(actions)[0], KvRequest)
    assert outcomes(actions) == [SUCCESS]
    assert generation.ledger.is_empty


@pytest.mark.parametrize(
    ("k", "ids", "tokens", "says"),
    [
        (RequestKey(7), (1, 2), 8, "local"),
        (K, (1, 99), 8, "page 99"),
        (K, (1, 1), 8, "twice"),
        (K, (1, 2, 3), 8, "lists 3 blocks"),
        (K, (1, 2), 4, "lists 2 blocks"),
    ],
)
def test_what_can_not_work_registers_nothing(generation: Generation, k: RequestKey, ids, tokens: int, says: str):
    actions = generation.ask(k, ids, tokens=tokens)
    assert outcomes(actions) == [(True, TransferFailure.WRITE_FAILED)]
    assert says in actions[0].message.reason
    assert said(actions) == []
    assert generation.ledger.is_empty
    assert generation.sessions.is_idle


def test_pages_of_another_attempt_are_refused_and_left_alone(generation: Generation):
    generation.ask(K, (1, 2))
    retry = RequestKey(K.request_id, 1)
    actions = generation.ask(retry, (2, 3))
    assert outcomes(actions) == [(True, TransferFailure.WRITE_FAILED)]
    assert generation.ledger.state(K) is PageState.EXPOSED
    generation.notice(0)
    assert outcomes(generation.notice(1)) == [SUCCESS]


def test_limits_of_the_peer_hold():
    generation = Generation(limits=TransferLimits(max_open_requests=1, max_block_ids=4))
    assert outcomes(generation.ask(key(2), (3, 4, 5), tokens=12)) == [(True, TransferFailure.WRITE_FAILED)]
    generation.ask(K)
    assert outcomes(generation.ask(key(2), (3, 4))) == [(True, TransferFailure.WRITE_FAILED)]


def test_unknown_peer(generation: Generation):
    generation.sessions.peer_gone(HOLDER_ID, "gone", 0.0)
    assert outcomes(generation.ask()) == [(True, TransferFailure.PEER_UNKNOWN)]
    generation.sessions.peer_refused(HOLDER_ID, "other weights", 0.0)
    (action,) = generation.ask()
    assert action.message.reason == "other weights"


def test_requests_wait_for_the_stream_but_not_for_ever():
    generation = Generation(ready=False)
    assert generation.ask() == []
    assert generation.ledger.held()[PageState.RESERVED] == 4
    generation.ask(key(2), (3, 4), now=3.0)
    generation.sessions.tick(5.0)
    assert outcomes(generation.take()) == [(True, TransferFailure.PEER_UNKNOWN)]
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 6.0)
    given_up, asked = said(generation.take())
    assert given_up == Cancel(K, 0)
    assert isinstance(asked, KvRequest)
    assert asked.key == key(2)


@pytest.mark.parametrize("end", ["withdraw", "gone", "superseded"])
def test_waiting_for_the_stream_can_be_given_up(end: str):
    generation = Generation(ready=False)
    generation.ask()
    match end:
        case "withdraw":
            generation.sessions.withdraw(K, 1.0)
        case "gone":
            generation.sessions.peer_gone(HOLDER_ID, "gone", 1.0)
        case _:
            generation.sessions.peer_superseded(HOLDER_ID, "restarted", 1.0)
    ((settled, failure),) = outcomes(generation.take())
    assert settled
    assert failure is not TransferFailure.NONE
    assert generation.ledger.is_empty


def test_deadline_fails_but_frees_nothing(generation: Generation):
    generation.ask()
    generation.sessions.tick(9.9)
    assert generation.take() == []
    generation.sessions.tick(10.0)
    actions = generation.take()
    assert outcomes(actions) == [(False, TransferFailure.TIMED_OUT)]
    assert said(actions) == [Cancel(K, 1)]
    for later in (1e4, 1e5, 1e6):
        generation.sessions.tick(later)
        assert outcomes(generation.take()) == []
    assert generation.ledger.held()[PageState.EXPOSED] == 4
    generation.notice(0)
    # Everything arrived after all: too late, the client has been told.
    assert outcomes(generation.notice(1)) == [(True, TransferFailure.TIMED_OUT)]
    assert generation.ledger.is_empty


def test_cancel_has_one_outcome(generation: Generation):
    generation.ask()
    generation.sessions.withdraw(K, 1.0)
    generation.sessions.withdraw(K, 1.0)
    assert generation.take() == [ToPeer(HOLDER_ID, Cancel(K, 1))]
    generation.notice(0, NEVER)
    assert outcomes(generation.notice(1, NEVER)) == [(True, TransferFailure.CANCELLED)]
    generation.sessions.withdraw(K, 2.0)
    assert generation.take() == []


def test_first_failed_writer_fails_and_the_last_one_settles(generation: Generation):
    generation.ask()
    actions = generation.notice(0, QUIESCED, reason="link down")
    assert outcomes(actions) == [(False, TransferFailure.WRITE_FAILED)]
    assert said(actions) == [Cancel(K, 1)]
    actions = generation.notice(1, NEVER)
    assert outcomes(actions) == [(True, TransferFailure.WRITE_FAILED)]
    assert actions[0].message.reason == "link down"


def test_pages_that_are_not_held_are_typed(generation: Generation):
    generation.ask()
    generation.notice(0, NEVER, reason="expired", not_held=True)
    assert outcomes(generation.notice(1, NEVER, reason="expired", not_held=True)) == [(True, TransferFailure.NOT_HELD)]


@pytest.mark.parametrize(
    "extents",
    [
        (),
        (Extent(0, 0, TokenRange(0, 4), 0, 3),),
        (Extent(0, 0, TokenRange(0, 8), 0, 9),),
        (Extent(0, 0, TokenRange(0, 8), 0, 3), Extent(0, 0, TokenRange(0, 8), 1, 2)),
    ],
    ids=["nothing", "half", "more than asked", "overlap"],
)
def test_incomplete_or_contradicting_manifest_never_decodes(generation: Generation, extents: tuple[Extent, ...]):
    generation.ask()
    generation.notice(0, DONE, extents=extents)
    (settled, failure) = outcomes(generation.notice(1))[-1]
    assert (settled, failure) == (True, TransferFailure.WRITE_FAILED)
    assert generation.ledger.is_empty


def test_notices_of_other_peers_attempts_and_ranks_change_nothing(generation: Generation):
    generation.ask()
    before = generation.ledger.waiting_for(K)
    generation.notice(0, peer=("c", b"x" * 16))
    generation.notice(0, k=RequestKey(K.request_id, 1))
    generation.notice(0, receive=2)
    generation.notice(0, receive=0)
    generation.sessions.notice(HOLDER_ID, TransferNotice(K, 0, 1, DONE, receive=1), 1.0)
    assert generation.take() == []
    assert generation.ledger.waiting_for(K) == before


def test_broken_stream_settles_and_fails_nothing(generation: Generation):
    generation.ask()
    generation.notice(0)
    generation.sessions.stream_broke(HOLDER_ID, 2.0)
    assert generation.take() == []
    assert generation.ledger.held()[PageState.IN_DOUBT] == 4
    assert [view.in_doubt for view in generation.sessions.views(3.0)] == [True]
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 3.0)
    assert said(generation.take()) == [Reconcile((ReceiveKey(K, 1),))]
    last = TransferNotice(K, 1, 1, DONE, PLANS[1].extents(TokenRange(0, 8)), receive=1)
    generation.sessions.reconciled(HOLDER_ID, ReconcileReply((), (last,)), 4.0)
    assert outcomes(generation.take()) == [SUCCESS]


def test_cancel_is_said_again_after_a_reconnect(generation: Generation):
    generation.ask()
    generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.withdraw(K, 2.0)
    assert generation.take() == []
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 3.0)
    generation.take()
    generation.sessions.reconciled(HOLDER_ID, ReconcileReply((ReceiveKey(K, 1),), ()), 4.0)
    assert said(generation.take()) == [Cancel(K, 1)]
    assert generation.ledger.held()[PageState.EXPOSED] == 4


def test_reply_that_leaves_an_attempt_out_is_refused(generation: Generation):
    generation.ask()
    generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, 3.0)
    with pytest.raises(ProtocolError, match=str(K)):
        generation.sessions.reconciled(HOLDER_ID, ReconcileReply((), ()), 4.0)
    assert generation.ledger.held()[PageState.IN_DOUBT] == 4


def test_deadline_in_doubt_fails_without_freeing(generation: Generation):
    generation.ask()
    generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.tick(10.0)
    assert outcomes(generation.take()) == [(False, TransferFailure.TIMED_OUT)]
    assert generation.ledger.held()[PageState.IN_DOUBT] == 4


@pytest.mark.parametrize("broken", [True, False])
def test_proof_of_exit_settles_after_the_fabric_has_drained(generation: Generation, broken: bool):
    generation.ask()
    if broken:
        generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.peer_exited("somebody else", [HOLDER_ID[1]], 2.0)
    generation.sessions.peer_exited(HOLDER_ID[0], [b"x" * 16], 2.0)
    assert generation.take() == []
    generation.sessions.peer_exited(HOLDER_ID[0], [HOLDER_ID[1]], 2.0)
    assert outcomes(generation.take()) == [(False, TransferFailure.PEER_LOST)]
    generation.sessions.peer_exited(HOLDER_ID[0], [HOLDER_ID[1]], 2.9)
    generation.sessions.tick(2.9)
    assert generation.take() == []
    generation.sessions.tick(3.0)
    assert outcomes(generation.take()) == [(True, TransferFailure.PEER_LOST)]
    assert generation.ledger.is_empty


def test_restarted_peer_fails_its_requests_but_is_no_proof(generation: Generation):
    generation.ask()
    generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.peer_superseded(HOLDER_ID, "restarted", 2.0)
    assert outcomes(generation.take()) == [(False, TransferFailure.PEER_LOST)]
    for later in (1e4, 1e5, 1e6):
        generation.sessions.tick(later)
        assert outcomes(generation.take()) == []
    assert generation.ledger.held()[PageState.IN_DOUBT] == 4


def test_own_rank_exit_fails_what_it_holds(generation: Generation):
    generation.ask()
    generation.sessions.rank_exited(1, "signal 9", 1.0)
    assert outcomes(generation.take()) == [(False, TransferFailure.WRITE_FAILED)]


def test_key_in_use_is_refused(generation: Generation):
    generation.ask()
    with pytest.raises(TransferStateError, match="already"):
        generation.ask()


def test_positions_that_want_nothing_are_no_pages(generation: Generation):
    (asked,) = said(generation.ask(ids=(-1, 2)))
    assert isinstance(asked, KvRequest)
    assert np.array_equal(asked.destinations[0].blocks, [-1, 2])
    assert generation.ledger.held()[PageState.EXPOSED] == 2
