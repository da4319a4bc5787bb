"""A generation leg has one deadline, whatever it waits for: its context leg, the cache, the cache once more."""

from __future__ import annotations

import pytest

from hub_world import blocks
from kvtransfer.ports import (
    Holder,
    ReceiveIntent,
    ReceiveOutcome,
    ReceiveRequest,
    SchedulerToHub,
    TokenRange,
    TransferFailure,
)
from kvtransfer.session.actions import ToScheduler
from kvtransfer.transceiver.policy import HandoffPolicy, Next
from kvtransfer.transceiver.scheduler import SchedulerTransceiver
from session_sides import GENERATION_CONFIG, HOLDER, HOLDER_ID, Generation, K

HERE = Holder("h:1", "c", b"i" * 16)


class Leg:
    """Ten seconds for everything; `at` seconds have passed."""

    def __init__(self) -> None:
        self.at, self.sent = 0.0, list[SchedulerToHub]()
        policy = HandoffPolicy(retries=1, timeout_s=10.0)
        self.role = SchedulerTransceiver(self, lambda: self.at, policy)

    def send(self, message: SchedulerToHub) -> None:
        self.sent.append(message)

    def ask(self, at: float) -> float:
        self.at = at
        self.role.request_and_receive_async(ReceiveRequest(K, TokenRange(0, 8), blocks(1, 2), HERE))
        asked = self.sent[-1]
        assert isinstance(asked, ReceiveRequest)
        return asked.timeout_s

    def fail(self, *, may_retry: bool) -> Next:
        failure = TransferFailure.WRITE_FAILED
        self.role.deliver(ReceiveOutcome(K, True, failure, "link", may_retry=may_retry))
        (outcome,) = self.role.check_gen_transfer_status()
        return self.role.next_step(outcome)


def test_time_spent_waiting_for_the_context_leg_counts():
    leg = Leg()
    leg.role.intend_to_receive(ReceiveIntent(K, HERE))
    assert leg.ask(7.0) == pytest.approx(3.0)


def test_a_retry_has_what_the_first_try_has_left():
    leg = Leg()
    assert leg.ask(1.0) == pytest.approx(10.0)
    assert leg.fail(may_retry=True) is Next.RETRY
    assert leg.ask(9.0) == pytest.approx(2.0)


def test_a_key_that_comes_again_after_its_end_begins_anew():
    leg = Leg()
    leg.ask(1.0)
    assert leg.fail(may_retry=False) is Next.FAIL
    assert leg.ask(9.0) == pytest.approx(10.0)


def test_too_late_is_answered_by_the_hub():
    leg = Leg()
    leg.role.intend_to_receive(ReceiveIntent(K, HERE))
    assert 0 < leg.ask(99.0) < 0.01


@pytest.mark.parametrize("published_at", [0.0, 4.0])
def test_the_hub_ends_it_then_also_when_the_stream_was_late(published_at: float):
    generation = Generation(ready=False, config=GENERATION_CONFIG)
    request = ReceiveRequest(K, TokenRange(0, 8), blocks(1, 2) + blocks(1, 2, rank=1), HOLDER, timeout_s=6.0)
    generation.sessions.receive(request, 0.0)
    generation.sessions.stream_ready(HOLDER_ID, generation.terms, published_at)
    generation.take()
    generation.sessions.tick(5.9)
    assert generation.take() == []
    generation.sessions.tick(6.0)
    (told,) = [one.message for one in generation.take() if isinstance(one, ToScheduler)]
    assert isinstance(told, ReceiveOutcome)
    assert (told.settled, told.failure) == (False, TransferFailure.TIMED_OUT)
