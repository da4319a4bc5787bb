"""One outcome for all ranks that hold a request: they report, the leader decides, everybody applies the same list.

    rank ── report(key, failure) ──▶ Leader ── Decision(number, key, failure) ──▶ Follower ── apply, between two steps
                                       └ a rank that has said nothing at the deadline: the request fails

Without it one rank could decode a request that another one has given up, and their collectives would never meet again.
No collective is needed for it: decisions are numbered, and a follower applies them in order and only between steps.

For engines whose ranks keep requests of their own. Where one scheduler plans the steps of all ranks there is nothing
left to agree on: the hub has joined what all writers say about all ranks in one manifest, its outcome reaches that
scheduler alone, and the numbered step that follows is the list of decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.ports import TransferFailure

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank does about a request; `number` counts the decisions of one leader incarnation from 1 on."""

    number: int
    key: RequestKey
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""


@dataclass(slots=True, eq=False)
class _Vote:
    missing: set[int]
    deadline: float
    failures: list[tuple[int, TransferFailure, str]] = field(default_factory=list[tuple[int, TransferFailure, str]])


class Leader:
    """Collects what the ranks report. `decide` takes the decisions in order and must not call back.

    `patience_s`: how long after the first report of a request the other ranks may take.
    """

    def __init__(self, patience_s: float, decide: Callable[[Decision], None]) -> None:
        self._patience_s, self._decide = patience_s, decide
        self._votes: dict[RequestKey, _Vote] = {}
        self._number = 0

    def expect(self, key: RequestKey, ranks: Collection[int], deadline: float) -> None:
        """These ranks hold the request. Raises TransferStateError for a key that is open, or without ranks."""
        if key in self._votes:
            raise TransferStateError(key, "is being agreed on already")
        if not ranks:
            raise TransferStateError(key, "is held by no rank: there is nothing to agree on")
        self._votes[key] = _Vote(set(ranks), deadline)

    def report(self, rank: int, key: RequestKey, failure: TransferFailure, reason: str, now: float) -> None:
        """A rank's terminal outcome. Repeats, and reports after the decision, change nothing."""
        vote = self._votes.get(key)
        if vote is None or rank not in vote.missing:
            return
        vote.missing.discard(rank)
        if failure is not TransferFailure.NONE:
            vote.failures.append((rank, failure, reason))
        vote.deadline = min(vote.deadline, now + self._patience_s)
        if not vote.missing:
            self._close(key, vote)

    def rank_exited(self, rank: int, reason: str) -> None:
        """The rank reports nothing any more: its requests fail now."""
        for key, vote in list(self._votes.items()):
            if rank in vote.missing:
                vote.failures.append((rank, TransferFailure.WRITE_FAILED, f"it exited: {reason}"))
                self._close(key, vote)

    def tick(self, now: float) -> None:
        """Requests of ranks that are late fail on all ranks."""
        for key, vote in list(self._votes.items()):
            if now >= vote.deadline:
                vote.failures += [(rank, TransferFailure.TIMED_OUT, "said nothing in time") for rank in vote.missing]
                self._close(key, vote)

    @property
    def is_idle(self) -> bool:
        """True when nothing is open."""
        return not self._votes

    def _close(self, key: RequestKey, vote: _Vote) -> None:
        del self._votes[key]
        self._number += 1
        # The same for the same reports, whatever order they came in.
        failures = sorted(vote.failures, key=lambda one: one[0])
        failure = failures[0][1] if failures else TransferFailure.NONE
        reason = "; ".join(f"rank {rank}: {why or kind.name.lower()}" for rank, kind, why in failures)
        self._decide(Decision(self._number, key, failure, reason))


class Follower:
    """One rank's list of decisions. They may arrive at any time, late, twice or out of order."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._next = 1
        self._waiting: dict[int, Decision] = {}

    def arrive(self, decision: Decision) -> None:
        """Takes a decision; it has no effect before `apply`. Raises ProtocolError for two of one number that differ,
        and when more wait for a missing one than could ever have been said."""
        known = self._waiting.get(decision.number)
        if known is not None and known != decision:
            raise ProtocolError(f"decision {decision.number} is about {known.key} and about {decision.key}")
        if decision.number < self._next or known is not None:
            return
        if len(self._waiting) >= self._limit:
            raise ProtocolError(f"{len(self._waiting)} decisions wait for number {self._next}")
        self._waiting[decision.number] = decision

    def apply(self, upto: int | None = None) -> list[Decision]:
        """Between two steps: decisions that are due, in order, without gaps. `upto`: the last number that this step may
        see; every rank is given the same one, so that all see the same list before the same step."""
        due: list[Decision] = []
        while self._next in self._waiting and (upto is None or self._next <= upto):
            due.append(self._waiting.pop(self._next))
            self._next += 1
        return due

    @property
    def complete_to(self) -> int:
        """The last number without a gap before it, applied or not: what this rank could apply now."""
        number = self._next
        while number in self._waiting:
            number += 1
        return number - 1
