"""What a scheduler is told to do about outcomes, and how much finished prefills may hold."""

from __future__ import annotations

import pytest

from hub_world import blocks, key
from kvtransfer.config import OnFailure
from kvtransfer.errors import TransferStateError
from kvtransfer.ports import (
    CancelTransfer,
    Holder,
    ReceiveOutcome,
    ReceiveRequest,
    SchedulerToHub,
    SendOffer,
    SendOutcome,
    TokenRange,
    TransferFailure,
)
from kvtransfer.transceiver.policy import HandoffPolicy, Next
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

A, B, TOKENS = key(1), key(2), TokenRange(0, 8)


class Port:
    def __init__(self) -> None:
        self.sent: list[SchedulerToHub] = []

    def send(self, message: SchedulerToHub) -> None:
        self.sent.append(message)


class Role(SchedulerTransceiver):
    """With a port that remembers."""

    def __init__(self, **policy) -> None:
        self.port = Port()
        super().__init__(self.port, policy=HandoffPolicy(**{"retries": 1, "on_failure": OnFailure.RECOMPUTE, **policy}))

    def ask(self, *ids: int) -> bool:
        self.request_and_receive_async(ReceiveRequest(A, TOKENS, blocks(*ids), Holder("h:1", "c", b"i" * 16)))
        asked = self.port.sent[-1]
        assert isinstance(asked, ReceiveRequest)
        return asked.may_retry

    def step(self, failure=TransferFailure.WRITE_FAILED, settled=True, may_retry=False) -> Next:
        self.deliver(ReceiveOutcome(A, settled, failure, "link", may_retry=may_retry))
        (outcome,) = self.check_gen_transfer_status()
        return self.next_step(outcome)


FAILED = TransferFailure.WRITE_FAILED


def test_one_retry_on_fresh_pages_then_recompute():
    role = Role()
    assert role.ask(1, 2)
    assert role.step(may_retry=True) is Next.RETRY
    assert role.failures(A) == ("link",)
    assert not role.ask(3, 4)
    assert role.step(FAILED) is Next.RECOMPUTE
    assert role.failures(A) == ()


@pytest.mark.parametrize(("configured", "step"), [(OnFailure.FAIL, Next.FAIL), (OnFailure.RECOMPUTE, Next.RECOMPUTE)])
def test_without_kept_pages_there_is_no_retry(configured: OnFailure, step: Next):
    role = Role(on_failure=configured)
    role.ask(1)
    assert role.step(TransferFailure.NOT_HELD) is step


def test_unsettled_failure_is_acted_on_once_and_its_pages_come_free_later():
    role = Role()
    role.ask(1)
    assert role.step(TransferFailure.TIMED_OUT, settled=False) is Next.RECOMPUTE
    assert role.has_inflight_transfer(A)
    assert role.step(TransferFailure.TIMED_OUT) is Next.FREE
    assert not role.has_inflight_transfer(A)


def test_success_after_a_retry_decodes():
    role = Role()
    role.ask(1)
    role.step(may_retry=True)
    role.ask(2)
    assert role.step(TransferFailure.NONE) is Next.DECODE


def test_own_cancel_is_no_failure():
    role = Role()
    role.ask(1)
    assert role.step(TransferFailure.CANCELLED, may_retry=True) is Next.FREE


def test_retry_that_can_not_be_made_tells_the_holder():
    for give_up in (True, False):
        role = Role()
        role.ask(1)
        role.step(may_retry=True)
        if give_up:
            assert role.give_up(A) is Next.RECOMPUTE
        else:
            assert role.cancel_request(A)
        assert role.port.sent[-1] == CancelTransfer(A)
        role.cancel_request(A)
        assert role.port.sent.count(CancelTransfer(A)) == 1


def test_an_engine_that_does_not_retry_does_not_say_so():
    role = Role(retries=0)
    assert not role.ask(1)


def test_held_prefills_are_capped_by_number_and_blocks():
    role = Role(max_held_requests=2, max_held_blocks=10)
    assert role.can_hold(10)
    role.respond_and_send_async(A, TOKENS, blocks(1, 2, 3, 4, 5, 6) + blocks(1, 2, 3, 4, 5, 6, group=1))
    assert role.held_blocks == 6
    assert role.can_hold(4)
    assert not role.can_hold(5)
    role.respond_and_send_async(B, TOKENS, blocks(7))
    assert not role.can_hold(0)
    role.deliver(SendOutcome(A))
    role.check_context_transfer_status()
    assert role.held_blocks == 1
    assert role.can_hold(9)


def test_chunks_of_one_offer():
    role = Role()
    role.respond_and_send_async(A, TokenRange(0, 4), blocks(1), is_last=False)
    role.respond_and_send_async(A, TokenRange(4, 8), blocks(1, 2), is_last=False)
    role.respond_and_send_async(A, TokenRange(8, 9), blocks(1, 2, 3))
    offers = [one for one in role.port.sent if isinstance(one, SendOffer)]
    assert [(one.chunk, one.more) for one in offers] == [(0, True), (1, True), (2, False)]
    assert role.held_blocks == 3
    with pytest.raises(TransferStateError, match="in flight"):
        role.respond_and_send_async(A, TOKENS, blocks(1))
