"""Planted bugs of the context side and of its ranks. See planted.py."""
# pyright: basic, reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import pytest

from kvtransfer.ports import RequestKey, SendOutcome, TransferFailure
from kvtransfer.session import writing
from kvtransfer.session.actions import ToScheduler
from kvtransfer.session.agreement import Follower, Leader
from kvtransfer.session.answers import Answers
from kvtransfer.session.bindings import Bindings
from kvtransfer.session.transmit import TransmitSessions
from kvtransfer.transceiver.rank import RankTransceiver

from .planted import planted


@planted
def exit_report_does_not_wait_for_the_fabric(patch: pytest.MonkeyPatch) -> None:
    """The context side takes a rank's exit for the end of its writes."""
    original = TransmitSessions.rank_exited

    def rank_exited(self, rank, reason, now):
        original(self, rank, reason, now)
        self._exited[rank] = (now, reason)
        self.tick(now)

    patch.setattr(TransmitSessions, "rank_exited", rank_exited)


@planted
def offer_ends_on_cancel(patch: pytest.MonkeyPatch) -> None:
    """The context side gives source pages back while they are read."""
    original = TransmitSessions._cancel

    def cancel(self, attempt, reason, now):
        original(self, attempt, reason, now)
        if self._open.pop(attempt.key, None) is not None:
            self._emit(ToScheduler(SendOutcome(attempt.key, TransferFailure.CANCELLED)))

    patch.setattr(TransmitSessions, "_cancel", cancel)


@planted
def release_twice(patch: pytest.MonkeyPatch) -> None:
    """An offer that has ended ends again when it is asked about."""
    original = TransmitSessions.cancel
    done: set[RequestKey] = set()

    def cancel(self, peer, key, receive, now):
        original(self, peer, key, receive, now)
        ended = self._answers._ended.get(key)
        if ended is not None and ended.offered and key not in done:
            done.add(key)
            self._emit(ToScheduler(SendOutcome(key)))

    patch.setattr(TransmitSessions, "cancel", cancel)


@planted
def forget_the_tombstone(patch: pytest.MonkeyPatch) -> None:
    """A cancel or a request that comes before the offer leaves no trace."""
    patch.setattr(Answers, "take_tombstone", lambda self, key: None)


@planted
def forget_what_was_said(patch: pytest.MonkeyPatch) -> None:
    """The context side does not remember the last words of writers."""

    def record(self, peer, key, receive, notices):
        self.seen(peer, receive)

    patch.setattr(Answers, "record", record)


@planted
def notice_before_the_agent_is_done(patch: pytest.MonkeyPatch) -> None:
    """A cancelled write is reported over while the agent still has it."""
    original = RankTransceiver._cancel

    def cancel(self, key, receive):
        original(self, key, receive)
        for write in [one for one in self._open if one.order.key == key]:
            self._open.remove(write)
            self._never(write.order, write.plan.dst_rank, "cancelled")

    patch.setattr(RankTransceiver, "_cancel", cancel)


@planted
def last_word_after_the_first_order(patch: pytest.MonkeyPatch) -> None:
    """A writer with several chunks is over when one of them is."""
    original = writing.Writing.conclude

    def conclude(self, attempt):
        for writer in attempt.missing:
            if attempt.writers[writer].parts:
                self.over(attempt, writer, attempt.writers[writer].parts)
        original(self, attempt)

    patch.setattr(writing.Writing, "conclude", conclude)


@planted
def decision_applied_in_the_middle_of_a_step(patch: pytest.MonkeyPatch) -> None:
    """A rank applies what has come, whatever the step may see."""
    original = Follower.apply
    patch.setattr(Follower, "apply", lambda self, upto=None: original(self))


@planted
def first_answer_speaks_for_all_ranks(patch: pytest.MonkeyPatch) -> None:
    """The leader decides when one rank has reported."""
    original = Leader.report

    def report(self, rank, key, failure, reason, now):
        vote = self._votes.get(key)
        if vote is not None:
            vote.missing = {rank}
        original(self, rank, key, failure, reason, now)

    patch.setattr(Leader, "report", report)


@planted
def bind_is_said_once(patch: pytest.MonkeyPatch) -> None:
    """An intent that is said again after a reconnect is not answered again."""
    original = Bindings.intent

    def intent(self, peer, key):
        binding = self._known.get(key)
        if binding is None or binding.peer is None:
            original(self, peer, key)

    patch.setattr(Bindings, "intent", intent)
