"""Thousands of seeded schedules of the hand-off with every fault that can be had, and planted bugs that must be found.

Checked all the time: no page is given away while a write can land in it, source pages are pinned under writes, nobody
decodes from bytes that are not his, every attempt has one end, clients hear within the deadline, everything is given
back in the end. A failing seed prints what happened; `Schedule(seed).run()` repeats it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from handoff_schedule import Schedule
from handoff_sim import Violation, plans_made_once
from kvtransfer.errors import KVTransferError
from kvtransfer.ledger import Ledger, PageState
from kvtransfer.ports import RequestKey, SendOutcome, TransferFailure
from kvtransfer.session import receive, receive_attempt, transmit, transmit_attempt
from kvtransfer.session.actions import ToScheduler
from kvtransfer.session.receive import ReceiveSessions
from kvtransfer.session.receive_attempt import IN_DOUBT, ReceiveEvent
from kvtransfer.session.transmit import TransmitSessions

pytestmark = pytest.mark.simulation

CHUNKS, SEEDS = 8, 250
# Schedules that a planted bug may survive.
BUDGET = 600


@pytest.fixture(autouse=True)
def plans() -> Iterator[None]:
    with plans_made_once():
        yield


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_schedules_hold(chunk: int):
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except (Violation, KVTransferError) as error:
            pytest.fail(f"seed {seed}: {error}\n" + "\n".join(schedule.world.trace[-80:]))


class Recording(dict):
    """A transition table that remembers what was looked up."""

    def __init__(self, table: dict) -> None:
        super().__init__(table)
        self.used = set()

    def get(self, key, default=None):
        self.used.add(key)
        return super().get(key, default)


def test_every_transition_happens(monkeypatch: pytest.MonkeyPatch):
    sending, receiving = Recording(transmit_attempt.TRANSITIONS), Recording(receive_attempt.TRANSITIONS)
    monkeypatch.setattr(transmit, "TRANSITIONS", sending)
    monkeypatch.setattr(receive, "TRANSITIONS", receiving)
    for seed in range(10_000, 10_000 + 2 * BUDGET):
        Schedule(seed).run()
        if sending.used == set(sending) and receiving.used == set(receiving):
            return
    missing = (set(sending) - sending.used) | (set(receiving) - receiving.used)
    pytest.fail(f"never taken: {sorted(str(one) for one in missing)}")


# --- planted bugs


def free_on_cancel(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.withdraw

    def withdraw(self, key, now):
        original(self, key, now)
        attempt = self._open.get(key)
        if attempt is not None:
            self._ledger.prove_dead(key, attempt.peer[1], now)
            self._step(attempt, ReceiveEvent.ALL_OVER, now)

    patch.setattr(ReceiveSessions, "withdraw", withdraw)


def ignore_attempt(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.notice

    def notice(self, peer, notice, now):
        for key, attempt in self._open.items():
            if key.request_id == notice.key.request_id and attempt.peer == peer:
                object.__setattr__(notice, "key", key)
        original(self, peer, notice, now)

    patch.setattr(ReceiveSessions, "notice", notice)


def scheduler_frees_on_the_unsettled_outcome(patch: pytest.MonkeyPatch) -> None:
    original = Schedule._received

    def received(self, node, outcome):
        original(self, node, outcome)
        if not outcome.settled:
            node.give_back(outcome.key)

    patch.setattr(Schedule, "_received", received)


def settle_on_first_writer(patch: pytest.MonkeyPatch) -> None:
    original = Ledger.settle

    def settle(self, key, writer, outcome, now):
        held = self._held.get(key)
        if held is not None and writer in held.writers:
            held.writers = dict.fromkeys(held.writers, outcome)
            held.writers[writer] = None
        return original(self, key, writer, outcome, now)

    patch.setattr(Ledger, "settle", settle)


def stream_break_is_death(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.stream_broke

    def stream_broke(self, peer, now):
        original(self, peer, now)
        for attempt in self._of(peer):
            if attempt.state in IN_DOUBT:
                self._fail_if_open(attempt, now)

    def fail_if_open(self, attempt, now):
        self._ledger.prove_dead(attempt.request.key, attempt.peer[1], now)
        attempt.failure = TransferFailure.PEER_LOST
        self._step(attempt, ReceiveEvent.ALL_OVER, now)

    patch.setattr(ReceiveSessions, "_fail_if_open", fail_if_open, raising=False)
    patch.setattr(ReceiveSessions, "stream_broke", stream_broke)


def skip_reconcile(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.stream_ready

    def stream_ready(self, peer, terms, now):
        for attempt in self._of(peer):
            if attempt.state in IN_DOUBT:
                self._ledger.reconcile(attempt.request.key, now)
                self._step(attempt, ReceiveEvent.RECONCILED, now)
        original(self, peer, terms, now)

    patch.setattr(ReceiveSessions, "stream_ready", stream_ready)


def timer_frees(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.tick

    def tick(self, now):
        original(self, now)
        for attempt in list(self._open.values()):
            if now >= attempt.deadline + 0.5 and self._ledger.state(attempt.request.key) is not PageState.RESERVED:
                self._ledger.prove_dead(attempt.request.key, attempt.peer[1], now)
                self._step(attempt, ReceiveEvent.ALL_OVER, now)

    patch.setattr(ReceiveSessions, "tick", tick)


def exit_report_does_not_wait_for_the_fabric(patch: pytest.MonkeyPatch) -> None:
    original = TransmitSessions.rank_exited

    def rank_exited(self, rank, reason, now):
        original(self, rank, reason, now)
        self._exited[rank] = (now, reason)
        self.tick(now)

    patch.setattr(TransmitSessions, "rank_exited", rank_exited)


def proof_of_exit_does_not_wait_for_the_fabric(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.peer_exited

    def peer_exited(self, instance_id, incarnations, now):
        original(self, instance_id, incarnations, now)
        for attempt in self._open.values():
            attempt.dead_at = None if attempt.dead_at is None else now

    patch.setattr(ReceiveSessions, "peer_exited", peer_exited)
    # The successor needs no time to start.
    patch.setattr(Schedule, "_restart", _restart_at_once)


def _restart_at_once(self, node) -> None:
    if node.alive and node.name != "g0":
        node.kill()
        self._succeed(node)


def restart_is_proof_without_exit_report(patch: pytest.MonkeyPatch) -> None:
    original = ReceiveSessions.peer_superseded

    def peer_superseded(self, peer, reason, now):
        original(self, peer, reason, now)
        for attempt in self._of(peer):
            self._ledger.prove_dead(attempt.request.key, attempt.peer[1], now)
            self._step(attempt, ReceiveEvent.ALL_OVER, now)

    patch.setattr(ReceiveSessions, "peer_superseded", peer_superseded)
    patch.setattr(Schedule, "_restart", _restart_at_once)


def offer_ends_on_cancel(patch: pytest.MonkeyPatch) -> None:
    original = TransmitSessions._cancel

    def cancel(self, attempt, reason, now):
        original(self, attempt, reason, now)
        if self._open.pop(attempt.offer.key, None) is not None:
            self._emit(ToScheduler(SendOutcome(attempt.offer.key, TransferFailure.CANCELLED)))

    patch.setattr(TransmitSessions, "_cancel", cancel)


def send_outcome_twice(patch: pytest.MonkeyPatch) -> None:
    original = TransmitSessions.tick
    done: set[RequestKey] = set()

    def tick(self, now):
        original(self, now)
        for key, finished in itertools.islice(self._finished.items(), 1):
            if finished.offered and key not in done:
                done.add(key)
                self._emit(ToScheduler(SendOutcome(key)))

    patch.setattr(TransmitSessions, "tick", tick)


def decode_without_a_complete_manifest(patch: pytest.MonkeyPatch) -> None:
    def take(self, attempt, notice):
        for pair, parts in attempt.manifest._need.extents.items():
            attempt.manifest.add(*pair, parts)
        return ""

    patch.setattr(ReceiveSessions, "_take", take)


def forget_the_finished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransmitSessions, "_remember", lambda self, key, finished: None)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    free_on_cancel,
    scheduler_frees_on_the_unsettled_outcome,
    settle_on_first_writer,
    stream_break_is_death,
    skip_reconcile,
    timer_frees,
    exit_report_does_not_wait_for_the_fabric,
    proof_of_exit_does_not_wait_for_the_fabric,
    restart_is_proof_without_exit_report,
    offer_ends_on_cancel,
    send_outcome_twice,
    decode_without_a_complete_manifest,
    forget_the_finished,
    ignore_attempt,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    bug(monkeypatch)
    for seed in range(50_000, 50_000 + BUDGET):
        try:
            Schedule(seed).run()
        except (Violation, KVTransferError):
            return
    pytest.fail(f"survived {BUDGET} schedules")
