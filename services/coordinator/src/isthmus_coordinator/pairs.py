"""Which context instance can hand off to which generation instance: what the generation instances report.

A report is kept until the generation instance is told that it needs no stream to that start of the context instance:
it reports changes only, so what it said stays true until then. Before it has been told anything, every report counts:
after a restart of the coordinator it may speak of context instances that have not come back yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from isthmus_coordinator.membership import Instance, Member, Start


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
class Estimate:
    """What a hand-off takes: `fixed_s` + `s_per_token` * tokens moved, over `path`."""

    fixed_s: float
    s_per_token: float
    path: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """What a generation instance last said about its stream to a context instance. `estimate` None: nothing known."""

    state: PairState
    incompatibilities: tuple[Incompatibility, ...] = ()
    estimate: Estimate | None = None


CONNECTING = Pair(PairState.CONNECTING)


class Pairs:
    """Announcements and reports, per stream of a generation instance."""

    def __init__(self) -> None:
        self._announced: dict[int, frozenset[Start]] = {}
        self._reports: dict[int, dict[Start, Pair]] = {}

    def open(self, token: int) -> None:
        """A generation instance has opened that stream."""
        self._reports[token] = {}

    def announced(self, token: int, peers: Iterable[Instance]) -> list[Start]:
        """The generation instance of that stream is being told this complete list. Returns the context instances whose
        reports no longer count."""
        starts = frozenset(peer.start for peer in peers)
        self._announced[token] = starts
        reports = self._reports[token]
        dropped = [start for start in reports if start not in starts]
        for start in dropped:
            del reports[start]
        return dropped

    def report(self, token: int, context: Start, pair: Pair) -> bool:
        """Take a report. False when it is about a start of a context instance that the last list does not name."""
        if token in self._announced and context not in self._announced[token]:
            return False
        reports = self._reports[token]
        for start in [start for start in reports if start.instance_id == context.instance_id]:
            del reports[start]  # one stream per context instance
        reports[context] = pair
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
        return len(self._reports)
