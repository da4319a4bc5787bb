"""Planted bugs of the generation side and of the scheduler. See planted.py."""
# pyright: basic, reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtransfer import manifest
from kvtransfer.ledger import Ledger, PageState
from kvtransfer.ports import TransferFailure
from kvtransfer.session import receive
from kvtransfer.session.answers import Answers
from kvtransfer.session.in_doubt import InDoubt
from kvtransfer.session.receive import ReceiveSessions
from kvtransfer.session.receive_attempt import IN_DOUBT, ReceiveEvent

from .generation_leg import GenerationLegs
from .pages import Hold, Pages
from .planted import planted
from .schedule import Schedule


def _settle(sessions: Any, attempt: Any, now: float) -> None:
    """What only writers or their death may do."""
    sessions._ledger.prove_dead(attempt.key, attempt.peer[1], now)
    sessions._step(attempt, ReceiveEvent.ALL_OVER, now)


@planted
def free_on_cancel(patch: pytest.MonkeyPatch) -> None:
    """The receiver gives the pages back when it is cancelled."""
    original = ReceiveSessions.withdraw

    def withdraw(self, key, now):
        original(self, key, now)
        attempt = self._open.get(key)
        if attempt is not None:
            _settle(self, attempt, now)

    patch.setattr(ReceiveSessions, "withdraw", withdraw)


@planted
def free_on_the_unsettled_outcome(patch: pytest.MonkeyPatch) -> None:
    """The scheduler frees the pages when it is told of the failure, not when it is told that they are settled."""
    original = GenerationLegs._received

    def received(self, node, outcome):
        original(self, node, outcome)
        target = self._schedule.attempts[outcome.key].target
        if not outcome.settled and target is not None:
            node.pages.free(target)

    patch.setattr(GenerationLegs, "_received", received)


@planted
def ignore_attempt(patch: pytest.MonkeyPatch) -> None:
    """A notice is taken for the open attempt of the same request, whichever attempt it names."""
    original = ReceiveSessions.notice

    def notice(self, peer, notice, now):
        for key, attempt in self._open.items():
            if key.request_id == notice.key.request_id and attempt.peer == peer:
                notice = notice._replace(key=key, receive=attempt.receive)
        original(self, peer, notice, now)

    patch.setattr(ReceiveSessions, "notice", notice)


@planted
def ignore_the_number_of_the_receive(patch: pytest.MonkeyPatch) -> None:
    """An answer to an earlier KvRequest of the same attempt is taken for this one's."""
    original = ReceiveSessions.notice

    def notice(self, peer, notice, now):
        attempt = self._open.get(notice.key)
        if attempt is not None:
            notice = notice._replace(receive=attempt.receive)
        original(self, peer, notice, now)

    patch.setattr(ReceiveSessions, "notice", notice)
    patch.setattr(Answers, "answer", _first_answer(Answers.answer))


def _first_answer(original: Any) -> Any:
    def answer(self, peer, key, receive, writers, reason):
        for (other, name, _), notices in self._said.items():
            if (other, name) == (peer, key):
                return notices
        return original(self, peer, key, receive, writers, reason)

    return answer


@planted
def retry_reuses_its_pages(patch: pytest.MonkeyPatch) -> None:
    """The next attempt at a request takes the pages of the last one, written to or not, and nobody objects."""
    original = Pages.take

    def take(self, key, count, now):
        for hold in self.owner:
            if hold is not None and hold.key.request_id == key.request_id and len(hold.pages) == count:
                again = Hold(self._node, key, hold.pages)
                for page in hold.pages:
                    self.owner[page] = again
                return again
        return original(self, key, count, now)

    patch.setattr(Pages, "take", take)
    patch.setattr(GenerationLegs, "_received", _retry_when_told(GenerationLegs._received))
    patch.setattr(Ledger, "_refuse", lambda self, *about: None)


def _retry_when_told(original: Any) -> Any:
    def received(self, node, outcome):
        attempt, schedule = self._schedule.attempts[outcome.key], self._schedule
        plan = attempt.plan
        original(self, node, outcome)
        if not outcome.settled and outcome.key.attempt + 1 < attempt.plan.attempts:
            schedule.waiting += 1
            attempt.plan = replace(attempt.plan, attempts=0)
            self._world.at(0.01, schedule.start, plan, outcome.key.attempt + 1)

    return received


@planted
def settle_on_first_writer(patch: pytest.MonkeyPatch) -> None:
    """The first writer that is over speaks for all."""
    original = Ledger.settle

    def settle(self, key, writer, outcome, now):
        held = self._held.get(key)
        if held is not None and writer in held.writers:
            held.writers = dict.fromkeys(held.writers, outcome)
            held.writers[writer] = None
        return original(self, key, writer, outcome, now)

    patch.setattr(Ledger, "settle", settle)


@planted
def byte_sum_instead_of_extents(patch: pytest.MonkeyPatch) -> None:
    """Complete is when as much has been reported as is needed, whatever it was and however often."""
    original = ReceiveSessions.notice

    def notice(self, peer, notice, now):
        attempt = self._open.get(notice.key)
        if attempt is None or attempt.receive != notice.receive or attempt.state.name not in ("WAITING", "DOUBT"):
            original(self, peer, notice, now)
            return
        self._left = getattr(self, "_left", {})
        name = (notice.key, notice.receive)
        left = self._left.setdefault(name, attempt.manifest.missing) - sum(map(manifest.area, notice.extents))
        self._left[name] = left
        if left > 0:
            original(self, peer, notice, now)
            return
        self._ledger.prove_dead(notice.key, peer[1], now)
        self._step(attempt, ReceiveEvent.COMPLETE, now)

    patch.setattr(ReceiveSessions, "notice", notice)


@planted
def decode_from_what_was_planned(patch: pytest.MonkeyPatch) -> None:
    """The manifest counts what a writer was to deliver, not what the agent says it delivered."""

    patch.setattr(receive, "take_notice", lambda manifest, notice: "")
    patch.setattr(manifest.Manifest, "complete", True)


@planted
def stream_break_is_death(patch: pytest.MonkeyPatch) -> None:
    """A peer whose stream broke is taken for dead."""
    original = ReceiveSessions.stream_broke

    def stream_broke(self, peer, now):
        original(self, peer, now)
        for attempt in self._of(peer):
            if attempt.state in IN_DOUBT:
                attempt.failure = TransferFailure.PEER_LOST
                _settle(self, attempt, now)

    patch.setattr(ReceiveSessions, "stream_broke", stream_broke)


@planted
def skip_reconcile(patch: pytest.MonkeyPatch) -> None:
    """After a reconnect everything is as if nothing had happened."""
    original = ReceiveSessions.stream_ready

    def stream_ready(self, peer, terms, now):
        for attempt in self._of(peer):
            if attempt.state in IN_DOUBT:
                self._ledger.reconcile(attempt.key, now)
                self._step(attempt, ReceiveEvent.RECONCILED, now)
        original(self, peer, terms, now)

    patch.setattr(ReceiveSessions, "stream_ready", stream_ready)


@planted
def timer_frees(patch: pytest.MonkeyPatch) -> None:
    """Half a second after the deadline nobody can be writing any more."""
    original = ReceiveSessions.tick

    def tick(self, now):
        original(self, now)
        for attempt in list(self._open.values()):
            if now >= attempt.deadline + 0.5 and self._ledger.state(attempt.key) is not PageState.RESERVED:
                _settle(self, attempt, now)

    patch.setattr(ReceiveSessions, "tick", tick)


@planted
def proof_of_exit_does_not_wait_for_the_fabric(patch: pytest.MonkeyPatch) -> None:
    """The generation side takes the exit of an incarnation for the end of its writes."""
    original = InDoubt.writers_exited

    def writers_exited(self, attempt, ranks, now):
        news = original(self, attempt, ranks, now)
        attempt.dead_at = now if news else attempt.dead_at
        return news

    patch.setattr(InDoubt, "writers_exited", writers_exited)
    patch.setattr(Schedule, "restart", _restart_at_once)


def _restart_at_once(self: Any, node: Any) -> None:
    """The successor needs no time to start."""
    if node.alive and node.name.startswith("c"):
        node.kill()
        self._succeed(node.name)


@planted
def restart_is_proof_without_exit_report(patch: pytest.MonkeyPatch) -> None:
    """Another incarnation at the same place is taken for the end of the old one's writes."""
    original = ReceiveSessions.peer_superseded

    def peer_superseded(self, peer, reason, now):
        original(self, peer, reason, now)
        for attempt in self._of(peer):
            _settle(self, attempt, now)

    patch.setattr(ReceiveSessions, "peer_superseded", peer_superseded)
    patch.setattr(Schedule, "restart", _restart_at_once)
