"""Ranks that disagree, are late or die: everybody does the same, in the same order, between the same steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hub_world import key
from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.ports import TransferFailure
from kvtransfer.session.agreement import Decision, Follower, Leader

A, B = key(1), key(2)
OK, FAILED = TransferFailure.NONE, TransferFailure.WRITE_FAILED


@pytest.fixture
def decisions() -> list[Decision]:
    return []


@pytest.fixture
def leader(decisions: list[Decision]) -> Leader:
    return Leader(2.0, decisions.append)


def test_nothing_is_decided_before_every_rank_has_reported(leader: Leader, decisions: list[Decision]):
    leader.expect(A, (0, 1), 100.0)
    leader.report(0, A, OK, "", 1.0)
    leader.report(0, A, FAILED, "changed its mind", 1.0)
    assert decisions == []
    leader.report(1, A, OK, "", 1.5)
    leader.report(1, A, FAILED, "late", 1.6)
    assert decisions == [Decision(1, A)]
    assert leader.is_idle


def test_one_failure_fails_all(leader: Leader, decisions: list[Decision]):
    leader.expect(A, (0, 1), 100.0)
    leader.report(1, A, FAILED, "link", 1.0)
    leader.report(0, A, OK, "", 1.0)
    assert decisions == [Decision(1, A, FAILED, "rank 1: link")]


def test_rank_that_is_missing_at_the_deadline_fails_its_requests_only(leader: Leader, decisions: list[Decision]):
    leader.expect(A, (0, 1), 100.0)
    leader.expect(B, (0,), 100.0)
    leader.report(0, A, OK, "", 1.0)
    leader.report(0, B, OK, "", 1.0)
    leader.tick(2.9)
    assert decisions == [Decision(1, B)]
    leader.tick(3.0)
    assert (decisions[1].key, decisions[1].failure) == (A, TransferFailure.TIMED_OUT)
    assert "rank 1" in decisions[1].reason
    leader.report(1, A, OK, "", 3.1)
    assert len(decisions) == 2


def test_request_nobody_reports_fails_at_its_own_deadline(leader: Leader, decisions: list[Decision]):
    leader.expect(A, (0, 1), 5.0)
    leader.tick(5.0)
    assert decisions[0].failure is TransferFailure.TIMED_OUT


def test_exited_rank_is_not_waited_for(leader: Leader, decisions: list[Decision]):
    leader.expect(A, (0, 1), 100.0)
    leader.expect(B, (0,), 100.0)
    leader.rank_exited(1, "signal 9")
    assert [one.key for one in decisions] == [A]
    assert "signal 9" in decisions[0].reason


def test_keys_are_agreed_on_once_at_a_time(leader: Leader):
    leader.expect(A, (0,), 1.0)
    with pytest.raises(TransferStateError, match="already"):
        leader.expect(A, (0,), 1.0)
    with pytest.raises(TransferStateError, match="no rank"):
        leader.expect(B, (), 1.0)


def test_decisions_wait_for_the_step_boundary_and_for_those_before_them():
    follower = Follower()
    first, second = Decision(1, A), Decision(2, B, FAILED)
    follower.arrive(second)
    assert follower.apply() == []
    follower.arrive(first)
    follower.arrive(first)
    assert follower.complete_to == 2
    assert follower.apply(upto=1) == [first]
    assert follower.apply() == [second]
    follower.arrive(first)
    assert follower.apply() == []


def test_contradicting_leader_is_not_followed():
    follower = Follower(limit=2)
    follower.arrive(Decision(2, A))
    with pytest.raises(ProtocolError, match="decision 2"):
        follower.arrive(Decision(2, B))
    follower.arrive(Decision(3, B))
    with pytest.raises(ProtocolError, match="wait for number 1"):
        follower.arrive(Decision(4, B))


@given(st.integers(0, 2**32))
def test_all_ranks_apply_the_same_list_before_the_same_step(seed: int):
    """Reports in any order, decisions delayed differently for each rank: equal lists, one outcome for each request."""
    chance, ranks, keys = random.Random(seed), range(4), [key(number) for number in range(6)]
    followers, sent = [Follower() for _ in ranks], list[Decision]()
    leader = Leader(3.0, sent.append)
    for one in keys:
        leader.expect(one, ranks, 50.0)
    reports = [(rank, one) for one in keys for rank in ranks if chance.random() < 0.9]
    chance.shuffle(reports)
    delayed = [list[Decision]() for _ in ranks]
    applied: list[list[list[Decision]]] = [[] for _ in ranks]
    for now in range(60):
        for rank, one in [reports.pop() for _ in range(min(len(reports), chance.randrange(3)))]:
            leader.report(rank, one, chance.choice([OK, OK, FAILED]), "", float(now))
        leader.tick(float(now))
        for queue, follower in zip(delayed, followers, strict=True):
            queue.extend(sent)
            chance.shuffle(queue)
            for decision in [queue.pop() for _ in range(min(len(queue), chance.randrange(4)))]:
                follower.arrive(decision)
        sent.clear()
        upto = min(follower.complete_to for follower in followers)
        for rank in ranks:
            applied[rank].append(followers[rank].apply(upto))
    assert all(steps == applied[0] for steps in applied)
    decided = [one.key for step in applied[0] for one in step]
    assert sorted(decided) == sorted(keys)
    assert leader.is_idle
