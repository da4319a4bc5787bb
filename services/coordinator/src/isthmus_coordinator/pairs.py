"""Which context instance can hand off to which generation instance: what the generation instances report.

A report is kept until the generation instance is told that it needs no stream to that start of the context instance:
it reports changes only, so what it said stays true until then. Before it has been told anything, every report counts:
after a restart of the coordinator it may speak of context instances that have not come back yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from isthmus_coordinator.membership import Member, Peers, Start


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
# Of one context instance; the oldest ones may be of instances that are gone.
_MOST_ESTIMATES = 4096


class Pairs:
    """Announcements and reports, per stream of a generation instance."""

    def __init__(self) -> None:
        self._announced: dict[int, frozenset[Start]] = {}
        self._reports: dict[int, dict[Start, Pair]] = {}
        # By stream of a context instance.
        self._estimates: dict[int, dict[Start, Estimate]] = {}

    def open(self, token: int) -> None:
        """A generation instance has opened that stream."""
        self._reports[token] = {}

    def announced(self, token: int, peers: Peers) -> list[Start]:
        """The generation instance of that stream is being told this complete list. Returns the context instances whose
        reports no longer count."""
        starts = self._announced[token] = peers.starts
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

    def estimate(self, token: int, generation: Start, estimate: Estimate) -> None:
        """What the context instance of that stream has measured. The newest start of a generation instance counts."""
        known = self._estimates.setdefault(token, {})
        for start in [start for start in known if start.instance_id == generation.instance_id]:
            del known[start]
        known[generation] = estimate
        if len(known) > _MOST_ESTIMATES:
            del known[next(iter(known))]

    def forget(self, token: int) -> None:
        """The stream is over."""
        self._estimates.pop(token, None)
        self._announced.pop(token, None)
        self._reports.pop(token, None)

    def state(self, context: Member, generation: Member) -> Pair:
        """What is known about a pair: what the generation instance says, its estimate before the other one's."""
        pair = self._reports.get(generation.token, {}).get(context.instance.start, CONNECTING)
        if pair.estimate is None:
            measured = self._estimates.get(context.token, {}).get(generation.instance.start)
            return pair if measured is None else replace(pair, estimate=measured)
        return pair

    def __len__(self) -> int:
        """Streams known."""
        return len(self._reports)
