"""The ranks of a generation instance agree on what has arrived, and apply it between the same two steps.

cache arrived ─▶ every rank reports ─▶ leader decides ─▶ every rank's list ─ a step begins ─▶ applied
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtransfer.ports import TransferFailure
from kvtransfer.session.agreement import Decision, Follower, Leader

from .shapes import RANKS
from .violation import Violation

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey

    from .node import Node

PATIENCE_S, DEADLINE_S = 0.3, 0.8
STEP_S = 0.05
# The leader's tick, a step, and the way of the decision.
BOUND_S = DEADLINE_S + 1.0


class Agreeing:
    """One generation instance. `applied(key, failure)` is called once per request, when the last rank has applied its
    decision. `disagrees`, `silent`: ranks of which the next report is a failure, or does not come."""

    def __init__(self, node: Node, applied: Callable[[RequestKey, TransferFailure], None]) -> None:
        self._node, self._world, self._applied = node, node.world, applied
        self._leader = Leader(PATIENCE_S, self._decided)
        self._followers = [Follower() for _ in range(RANKS)]
        # Requests that are not decided, with the ranks that do not say that all is well.
        self._open: dict[RequestKey, set[int]] = {}
        # What each rank has applied, in order, with the number of the step.
        self._logs: list[list[tuple[int, Decision]]] = [[] for _ in range(RANKS)]
        self._step, self._compared, self._stepping = 0, 0, False
        self.disagrees: set[int] = set()
        self.silent: set[int] = set()

    def start(self, key: RequestKey) -> None:
        """The cache of a request is there. Without a living rank nothing happens: the instance is about to end."""
        living = self._living()
        if not living:
            return
        self._open[key] = set()
        self._leader.expect(key, living, self._world.now + DEADLINE_S)
        for rank in living:
            self._world.at(self._world.latency(0.02), self._report, rank, key)
        self._world.at(BOUND_S, self._bound, key)
        self._run()

    def rank_exited(self, rank: int, reason: str) -> None:
        """By its parent."""
        self._leader.rank_exited(rank, reason)

    @property
    def idle(self) -> bool:
        """Nothing is being agreed on."""
        return not self._open and self._leader.is_idle

    def _living(self) -> list[int]:
        return [rank.number for rank in self._node.ranks if rank.alive]

    def _report(self, rank: int, key: RequestKey) -> None:
        if not self._node.alive or not self._node.ranks[rank].alive:
            return
        failed = rank in self.disagrees
        if key in self._open and (failed or rank in self.silent):
            self._open[key].add(rank)
        if rank in self.silent:
            self.silent.discard(rank)
            return
        self.disagrees.discard(rank)
        failure = TransferFailure.WRITE_FAILED if failed else TransferFailure.NONE
        self._leader.report(rank, key, failure, "its part is damaged" if failed else "", self._world.now)

    def _decided(self, decision: Decision) -> None:
        self._world.note("decides", self._node.name, decision.number, decision.key, decision.failure.name)
        for follower in self._followers:
            self._world.at(self._world.latency(0.03), follower.arrive, decision)

    def _run(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._world.at(STEP_S, self._begin_step)

    def _begin_step(self) -> None:
        """What a step may see is settled when it begins; each rank comes to it in its own time."""
        self._stepping = False
        if not self._node.alive or not self._open:
            return
        self._leader.tick(self._world.now)
        self._step += 1
        upto = min(self._followers[rank].complete_to for rank in self._living()) if self._living() else 0
        for rank in self._living():
            self._world.at(self._world.random.random() * STEP_S * 0.8, self._apply, rank, self._step, upto)
        self._world.at(STEP_S * 0.9, self._end_step)
        self._run()

    def _apply(self, rank: int, step: int, upto: int) -> None:
        self._logs[rank] += [(step, decision) for decision in self._followers[rank].apply(upto)]

    def _end_step(self) -> None:
        if not self._node.alive:
            return
        living = self._living()
        new = [self._logs[rank][self._compared :] for rank in living]
        if any(log != new[0] for log in new):
            raise Violation(f"the ranks of {self._node.name} apply different decisions in step {self._step}: {new}")
        for _, decision in new[0] if new else ():
            self._compared += 1
            against = self._open.pop(decision.key)
            if against and decision.failure is TransferFailure.NONE:
                raise Violation(f"{decision.key} is decoded although ranks {sorted(against)} do not say that it can be")
            self._applied(decision.key, decision.failure)

    def _bound(self, key: RequestKey) -> None:
        if self._node.alive and key in self._open and self._living():
            raise Violation(f"the ranks of {self._node.name} have not agreed on {key} in {BOUND_S:g} s")
