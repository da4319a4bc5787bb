"""The scheduler role: memory belongs to the transfer until its settled outcome has been taken at a step boundary."""

from __future__ import annotations

import threading

import pytest

from hub_world import blocks, key
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
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

A, B = key(1), key(2)
TOKENS = TokenRange(0, 8)


class Port:
    def __init__(self) -> None:
        self.sent: list[SchedulerToHub] = []
        self.gone = False

    def send(self, message: SchedulerToHub) -> None:
        if self.gone:
            raise ConnectionError("the hub is gone")
        self.sent.append(message)


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def role(port: Port) -> SchedulerTransceiver:
    return SchedulerTransceiver(port)


def request(key=A) -> ReceiveRequest:
    return ReceiveRequest(key, TOKENS, blocks(1, 2), Holder("h:1", "c", b"i" * 16))


def test_offer_is_in_flight_until_its_outcome_is_taken(role: SchedulerTransceiver, port: Port):
    role.respond_and_send_async(A, TOKENS, blocks(1, 2))
    assert [type(one) for one in port.sent] == [SendOffer]
    assert role.has_inflight_transfer(A)
    assert not role.has_retired_send_session(A)
    role.deliver(SendOutcome(A))
    # Delivered is not applied.
    assert role.has_inflight_transfer(A)
    assert role.has_retired_send_session(A)
    assert role.check_context_transfer_status() == [SendOutcome(A)]
    assert not role.has_inflight_transfer(A)
    assert not role.has_retired_send_session(A)


def test_receive_is_in_flight_until_it_is_settled(role: SchedulerTransceiver):
    role.request_and_receive_async(request())
    unsettled = ReceiveOutcome(A, False, TransferFailure.TIMED_OUT)
    role.deliver(unsettled)
    assert role.check_gen_transfer_status() == [unsettled]
    assert role.has_inflight_transfer(A)
    assert role.cancel_request(A) is False
    role.deliver(ReceiveOutcome(A, True, TransferFailure.TIMED_OUT))
    assert role.cancel_request(A) is False
    assert len(role.check_gen_transfer_status()) == 1
    assert role.cancel_request(A) is True
    assert role.check_gen_transfer_complete()


def test_cancel_is_said_once_and_asked_again(role: SchedulerTransceiver, port: Port):
    assert role.cancel_request(A) is True
    role.request_and_receive_async(request())
    assert [role.cancel_request(A) for _ in range(3)] == [False, False, False]
    assert [one for one in port.sent if isinstance(one, CancelTransfer)] == [CancelTransfer(A)]


@pytest.mark.parametrize("side", ["send", "receive"])
def test_failed_hand_over_undoes_its_registration(role: SchedulerTransceiver, port: Port, side: str):
    port.gone = True
    with pytest.raises(ConnectionError):
        role.respond_and_send_async(A, TOKENS, ()) if side == "send" else role.request_and_receive_async(request())
    assert not role.has_inflight_transfer(A)
    assert role.cancel_request(A) is True


def test_key_in_flight_is_refused(role: SchedulerTransceiver, port: Port):
    role.request_and_receive_async(request())
    for attempt in (lambda: role.request_and_receive_async(request()), lambda: role.prepare_context_requests([A])):
        with pytest.raises(TransferStateError, match="in flight"):
            attempt()
    assert len(port.sent) == 1


def test_prepared_keys_are_reserved_all_or_none(role: SchedulerTransceiver):
    with pytest.raises(TransferStateError, match="prepared already"):
        role.prepare_context_requests([A, B, A])
    role.prepare_context_requests([A, B])
    with pytest.raises(TransferStateError, match="prepared"):
        role.request_and_receive_async(request(A))
    assert role.cancel_request(A) is True
    role.prepare_context_requests([A])
    role.respond_and_send_async(B, TOKENS, ())
    assert role.has_inflight_transfer(B)


def test_waiting_never_counts_more_than_is_in_flight(role: SchedulerTransceiver):
    # Would wait for an hour if the target was not clamped.
    assert role.check_context_transfer_status(at_least=3, timeout_s=3600) == []
    assert role.check_gen_transfer_status(at_least=3, timeout_s=3600) == []
    role.request_and_receive_async(request(A))
    threading.Timer(0.05, lambda: role.deliver(ReceiveOutcome(A, True))).start()
    assert role.check_gen_transfer_status(at_least=5, timeout_s=3600) == [ReceiveOutcome(A, True)]


def test_sync_receive_leaves_other_outcomes_alone(role: SchedulerTransceiver):
    role.request_and_receive_async(request(B))
    role.deliver(ReceiveOutcome(B, True))
    threading.Timer(0.05, lambda: role.deliver(ReceiveOutcome(A, True))).start()
    assert role.request_and_receive_sync(request(A), deadline_s=3600) == ReceiveOutcome(A, True)
    assert not role.has_inflight_transfer(A)
    assert role.check_gen_transfer_status() == [ReceiveOutcome(B, True)]


def test_sync_receive_is_withdrawn_at_its_deadline(role: SchedulerTransceiver, port: Port):
    outcome = role.request_and_receive_sync(request(A), deadline_s=0.02)
    assert (outcome.settled, outcome.failure) == (False, TransferFailure.TIMED_OUT)
    assert CancelTransfer(A) in port.sent
    assert role.has_inflight_transfer(A)
    role.deliver(ReceiveOutcome(A, True, TransferFailure.CANCELLED))
    role.check_gen_transfer_status()
    assert not role.has_inflight_transfer(A)


def test_only_whole_caches_may_be_reused_and_only_once(role: SchedulerTransceiver):
    role.request_and_receive_async(request(A))
    with pytest.raises(TransferStateError, match="incomplete"):
        role.commit_blocks_for_reuse(A)
    role.request_and_receive_async(request(B))
    role.deliver(ReceiveOutcome(A, True))
    role.deliver(ReceiveOutcome(B, True, TransferFailure.CANCELLED))
    role.check_gen_transfer_status()
    assert [role.commit_blocks_for_reuse(one) for one in (A, B, A)] == [True, False, False]


def test_second_end_is_an_error(role: SchedulerTransceiver):
    role.respond_and_send_async(A, TOKENS, ())
    role.deliver(SendOutcome(A))
    role.deliver(SendOutcome(A))
    with pytest.raises(TransferStateError, match="not in flight"):
        role.check_context_transfer_status()


def test_shutdown_withdraws_everything_and_takes_nothing_new(role: SchedulerTransceiver, port: Port):
    role.respond_and_send_async(A, TOKENS, ())
    role.request_and_receive_async(request(B))
    role.shutdown()
    assert {one.key for one in port.sent if isinstance(one, CancelTransfer)} == {A, B}
    with pytest.raises(TransferStateError, match="shutdown"):
        role.request_and_receive_async(request(key(3)))
    role.deliver(SendOutcome(A, TransferFailure.CANCELLED))
    assert [one.key for one in role.check_context_transfer_status()] == [A]


def test_the_role_says_what_kinds_of_hand_off_there_are(role: SchedulerTransceiver):
    params = role.get_disaggregated_params()
    assert params.schedules == ("context_first", "generation_first")
    assert params.pipeline_transfer is role.pipeline_transfer_enabled is True
    assert params.transfer_buffer is role.consumes_transfer_buffer() is False
