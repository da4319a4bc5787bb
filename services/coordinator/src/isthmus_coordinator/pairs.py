"""Which context instance can hand off to which generation instance: what the generation instances report.

A report is kept for as long as the generation instance has been told to hold a stream to that start of the context
instance: it reports changes, so what it said stays true until it is told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from isthmus_coordinator.membership import Instance, Member, Role, Start


class PairState(Enum):
    """State of a pair. Values are those of `isthmus.v1.PairState`."""

    CONNECTING = 1
    READY = 2
    INCOMPATIBLE = 3


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One reason why two instances can not work together."""

    field: str
    mine: str
    yours: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Pair:
    """What a generation instance last said about its stream to a context instance."""

    state: PairState
    incompatibilities: tuple[Incompatibility, ...] = ()


CONNECTING = Pair(PairState.CONNECTING)


def peers_of(member: Member, members: Iterable[Member]) -> tuple[Instance, ...]:
    """Context instances that a generation instance keeps streams to: all of its model, draining ones too, because
    what they hold must still be handed off."""
    if member.instance.role is not Role.GENERATION:
        return ()
    return tuple(
        other.instance
        for other in members
        if other.instance.role is Role.CONTEXT and other.instance.model == member.instance.model
    )


class Pairs:
    """Announcements and reports, per stream of a generation instance."""

    def __init__(self) -> None:
        self._announced: dict[int, frozenset[Start]] = {}
        self._reports: dict[int, dict[Start, Pair]] = {}

    def announced(self, token: int, peers: Iterable[Instance]) -> None:
        """The generation instance of that stream is being told this complete list."""
        starts = frozenset(peer.start for peer in peers)
        self._announced[token] = starts
        reports = self._reports.get(token, {})
        self._reports[token] = {start: pair for start, pair in reports.items() if start in starts}

    def report(self, token: int, context: Start, pair: Pair) -> bool:
        """Take a report. False when it is about a start of a context instance that was not announced (any more)."""
        if context not in self._announced.get(token, ()):
            return False
        self._reports[token][context] = pair
        return True

    def forget(self, token: int) -> None:
        """The stream is over."""
        self._announced.pop(token, None)
        self._reports.pop(token, None)

    def state(self, context: Member, generation: Member) -> Pair:
        """What is known about a pair."""
        return self._reports.get(generation.token, {}).get(context.instance.start, CONNECTING)

    def __len__(self) -> int:
        """Streams known."""
        return len(self._announced)
