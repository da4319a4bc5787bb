"""Pages whose writers say nothing: their hub is asked, then they leak, then the instance stops. Nothing is ever freed
without the writers' word or the proof of their death."""

from __future__ import annotations

from kvtransfer.config import TransferConfig
from kvtransfer.ledger import Ledger, PageState
from kvtransfer.messages import ReceiveKey
from kvtransfer.ports import TransferFailure
from kvtransfer.session.actions import Action, Fence, KillRank, StopInstance, ToScheduler
from session_sides import DONE, GENERATION, HOLDER, HOLDER_ID, NEVER, PEER, Context, Generation, K, said


def fences(actions: list[Action]) -> list[Fence]:
    return [one for one in actions if isinstance(one, Fence)]


def stops(actions: list[Action]) -> list[StopInstance]:
    return [one for one in actions if isinstance(one, StopInstance)]


def silent(config: TransferConfig | None = None) -> Generation:
    """A receive that has timed out at 10 s and was first looked at then."""
    generation = Generation(config=config)
    generation.ask()
    generation.sessions.tick(10.0)
    generation.take()
    return generation


def test_hub_of_silent_writers_is_asked_after_the_deadline_and_again():
    generation = silent()
    generation.sessions.tick(19.9)
    assert fences(generation.take()) == []
    generation.sessions.tick(20.0)
    (fence,) = fences(generation.take())
    assert (fence.peer, fence.endpoint, fence.receives) == (HOLDER_ID, HOLDER.endpoint, (ReceiveKey(K, 1),))
    generation.sessions.tick(24.9)
    assert fences(generation.take()) == []
    generation.sessions.tick(25.0)
    assert len(fences(generation.take())) == 1


def test_a_receive_that_is_not_over_yet_is_no_suspect():
    generation = Generation()
    generation.ask()
    generation.sessions.stream_broke(HOLDER_ID, 1.0)
    generation.sessions.tick(9.9)
    assert fences(generation.take()) == []


def test_exit_of_one_rank_settles_only_what_it_writes():
    generation = silent()
    generation.sessions.peer_ranks_exited(HOLDER_ID, [0], "signal 9", 20.0)
    generation.sessions.tick(21.0)
    assert generation.ledger.waiting_for(K) == ((1, 1),)
    assert generation.ledger.held()[PageState.EXPOSED] == 4
    generation.sessions.peer_ranks_exited(HOLDER_ID, [1], "signal 9", 22.0)
    generation.sessions.tick(22.9)
    assert not generation.ledger.is_empty
    generation.sessions.tick(23.0)
    assert generation.ledger.is_empty


def test_exit_of_a_rank_that_has_said_its_last_word_changes_nothing():
    generation = Generation()
    generation.ask()
    generation.notice(0)
    generation.sessions.peer_ranks_exited(HOLDER_ID, [0], "signal 9", 2.0)
    assert generation.take() == []
    (over,) = [one.message for one in generation.notice(1, DONE) if isinstance(one, ToScheduler)]
    assert over.failure is TransferFailure.NONE


def test_pages_leak_within_the_budget_and_stop_the_instance_beyond_it():
    size = sum(int(view.entries.size.sum()) for view in GENERATION.ranks[0].page_table.groups[0].views)
    for budget, stopped in ((4 * size, False), (4 * size - 1, True)):
        generation = silent(TransferConfig("loopback", timeout_s=10, drain_s=1, leak_budget_bytes=budget))
        for second in range(20, 31, 5):
            assert generation.sessions.leaked_bytes == 0
            generation.sessions.tick(float(second))
        assert generation.sessions.leaked_bytes == 4 * size
        assert len(stops(generation.take())) == stopped
        generation.sessions.tick(1000.0)
        assert stops(generation.take()) == []
        # Not free for all that.
        assert generation.ledger.held()[PageState.EXPOSED] == 4
        generation.notice(0, NEVER)
        generation.notice(1, NEVER)
        generation.sessions.tick(1001.0)
        assert generation.sessions.leaked_bytes == 0


def test_without_fencing_pages_leak_at_once_and_nobody_is_killed():
    generation = silent(TransferConfig("loopback", timeout_s=10, drain_s=1, fence_writer=False))
    generation.sessions.tick(20.0)
    assert fences(generation.take()) == []
    assert generation.sessions.leaked_bytes > 0


def test_bytes_of_an_attempt_are_those_of_its_pages():
    ledger = Ledger({(0, 0): 8}, page_bytes={(0, 0): 100})
    from hub_world import blocks

    ledger.reserve(K, blocks(1, -1, 3), b"i" * 16, 0.0)
    assert ledger.nbytes(K) == 200
    ledger.release(K)
    assert ledger.nbytes(K) == 0


# --- the context side


def kills(actions: list[Action]) -> list[int]:
    return [one.rank for one in actions if isinstance(one, KillRank)]


def test_only_ranks_that_still_write_for_the_receive_are_killed():
    context = Context()
    context.writing()
    context.notice(0)
    notices = context.sessions.fence(PEER, [ReceiveKey(K, 1)])
    assert kills(context.take()) == [1]
    assert [(one.src_rank, one.outcome) for one in notices] == [(0, DONE)]
    context.sessions.rank_exited(1, "signal 9", 5.0)
    context.sessions.fence(PEER, [ReceiveKey(K, 1)])
    assert kills(context.take()) == []
    context.sessions.tick(6.0)
    assert len(said(context.take(), PEER)) == 1


def test_fence_of_another_receive_kills_nobody():
    context = Context()
    context.writing()
    notices = context.sessions.fence(PEER, [ReceiveKey(K, 7)])
    assert kills(context.take()) == []
    assert {one.outcome for one in notices} == {NEVER}


def test_goodbye_of_the_peer_withdraws_what_it_has_asked_for():
    context = Context()
    context.writing()
    context.sessions.goodbye(PEER, "it stops", 2.0)
    context.notice(0, NEVER)
    (over,) = [one.message for one in context.notice(1, NEVER) if isinstance(one, ToScheduler)]
    assert over.failure is TransferFailure.CANCELLED


def test_own_rank_that_does_not_finish_what_was_cancelled_is_killed():
    """Nobody else would ever ask when the peer has been restarted."""
    context = Context()
    context.writing()
    context.sessions.goodbye(PEER, "restarted", 2.0)
    context.take()
    context.sessions.tick(11.9)
    assert kills(context.take()) == []
    context.sessions.tick(12.0)
    assert kills(context.take()) == [0, 1]
    context.sessions.tick(13.0)
    assert kills(context.take()) == []


def test_destination_of_a_dead_rank_is_refused_at_once():
    generation = Generation()
    generation.sessions.rank_exited(1, "signal 9", 0.0)
    (over,) = [one.message for one in generation.ask() if isinstance(one, ToScheduler)]
    assert (over.settled, over.failure) == (True, TransferFailure.WRITE_FAILED)
    assert "[1]" in over.reason
