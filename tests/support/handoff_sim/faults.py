"""What is done to a running schedule, and the record of what it met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from .script import Fault, FaultKind
from .shapes import RANKS

if TYPE_CHECKING:
    from .attempt import Attempt
    from .coverage import Coverage
    from .node import Node
    from .schedule import Schedule

Thing = TypeVar("Thing")
_AT_CONTEXTS = (FaultKind.CONTEXT_RANK_DIES, FaultKind.CONTEXT_RESTARTS, FaultKind.CONTEXT_STOPS)


class Faults:
    """Carries out the faults of a script. A fault that finds nothing to hit does nothing."""

    def __init__(self, schedule: Schedule, coverage: Coverage) -> None:
        self._schedule, self._world, self._coverage = schedule, schedule.world, coverage
        self._harmless = True
        self._do: dict[FaultKind, Callable[[Fault], None]] = {
            FaultKind.BREAK: self._break,
            FaultKind.DUPLICATE_CONNECT: self._duplicate,
            FaultKind.PARTITION: self._partition,
            FaultKind.CANCEL: self._cancel,
            FaultKind.WITHDRAW: self._withdraw,
            FaultKind.CONTEXT_RANK_DIES: self._rank_dies,
            FaultKind.GENERATION_RANK_DIES: self._rank_dies,
            FaultKind.CONTEXT_RESTARTS: self._restart,
            FaultKind.GENERATION_RESTARTS: self._restart,
            FaultKind.CONTEXT_STOPS: self._stop,
            FaultKind.GENERATION_STOPS: self._stop,
            FaultKind.LEAVE: self._leave,
            FaultKind.STALL: self._stall,
            FaultKind.RANK_DISAGREES: self._disagree,
            FaultKind.RANK_SILENT: self._disagree,
            FaultKind.WRITE_FAILS: self._arm,
            FaultKind.WRITE_LATE: self._arm,
            FaultKind.COMPLETION_LOST: self._arm,
        }

    def happen(self, fault: Fault) -> None:
        """Now."""
        self._world.note(f"fault: {fault.kind.value}")
        self._harmless &= fault.kind in (FaultKind.CANCEL, FaultKind.WITHDRAW)
        self._do[fault.kind](fault)

    @property
    def calm(self) -> bool:
        """Nothing has happened that could keep a message from coming: no fault, nobody fenced, nobody started anew."""
        nodes = self._schedule.where.values()
        return self._harmless and all(node.life == 0 and all(rank.alive for rank in node.ranks) for node in nodes)

    def _met(self, kind: FaultKind, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            phase = attempt.phase
            if phase is not None:
                self._coverage.phases.add((kind, phase))
                for other in attempt.faults:
                    a, b = sorted((kind, other), key=lambda one: one.name)
                    self._coverage.pairs.add((a, b))
                attempt.faults.add(kind)

    def _at(self, node: Node) -> list[Attempt]:
        return [attempt for attempt in self._schedule.open_attempts() if attempt.involves(node)]

    def _between(self, a: Node, b: Node) -> list[Attempt]:
        return [attempt for attempt in self._at(a) if attempt.involves(b)]

    def _break(self, fault: Fault) -> None:
        links = [
            link
            for node in self._schedule.generations()
            for link in node.links.values()
            if link is not None and link.open
        ]
        link = _pick(links, fault.target)
        if link is not None:
            self._met(fault.kind, self._between(link.context, link.generation))
            if fault.kind is FaultKind.BREAK:
                link.end()
            else:
                link.replace()

    _duplicate = _break

    def _partition(self, fault: Fault) -> None:
        a = _pick(self._schedule.contexts(), fault.target)
        b = _pick(self._schedule.generations(), fault.target * 7 % 1)
        if a is not None and b is not None and a.alive and b.alive:
            self._met(fault.kind, self._between(a, b))
            a.partition(b, fault.length * 3)

    def _cancel(self, fault: Fault) -> None:
        asked = [
            attempt
            for attempt in self._schedule.open_attempts()
            if attempt.generation is not None and attempt.generation.alive
        ]
        attempt = _pick(asked, fault.target)
        if attempt is not None and attempt.generation is not None:
            self._met(fault.kind, [attempt])
            self._schedule.generation_legs.cancel(attempt, attempt.generation)

    def _withdraw(self, fault: Fault) -> None:
        attempt = _pick([one for one in self._schedule.open_attempts() if one.context.alive], fault.target)
        if attempt is not None:
            self._met(fault.kind, [attempt])
            attempt.withdrawn = True
            attempt.context.transceiver.cancel_request(attempt.key)

    def _rank_dies(self, fault: Fault) -> None:
        node = self._node(fault)
        if node is not None:
            self._met(fault.kind, self._at(node))
            node.kill_rank(int(fault.target * 31) % RANKS, "fault")

    def _restart(self, fault: Fault) -> None:
        node = self._node(fault)
        if node is not None:
            self._met(fault.kind, self._at(node))
            self._schedule.restart(node)

    def _stop(self, fault: Fault) -> None:
        node = self._node(fault)
        if node is not None:
            self._met(fault.kind, self._at(node))
            node.stop()

    def _leave(self, fault: Fault) -> None:
        self._met(fault.kind, self._schedule.open_attempts())
        for node in self._schedule.generations():
            if node.alive:
                node.core.set_peers([], self._world.now)
        self._world.at(fault.length, self._schedule.announce)

    def _stall(self, fault: Fault) -> None:
        node = _pick([node for node in self._schedule.contexts() if node.alive], fault.target)
        if node is not None:
            self._met(fault.kind, self._at(node))
            node.ranks[int(fault.target * 31) % RANKS].stall(fault.length * 2)

    def _disagree(self, fault: Fault) -> None:
        """The next report of a rank is of that kind."""
        node = self._node(fault)
        if node is not None:
            self._met(fault.kind, self._at(node))
            ranks = node.agreeing.silent if fault.kind is FaultKind.RANK_SILENT else node.agreeing.disagrees
            ranks.add(int(fault.target * 31) % RANKS)

    def _arm(self, fault: Fault) -> None:
        """The next write of a rank takes it; when one of that rank is open, that one does."""
        node = _pick([node for node in self._schedule.contexts() if node.alive], fault.target)
        if node is None:
            return
        rank = node.ranks[int(fault.target * 31) % RANKS]
        self._met(fault.kind, self._at(node))
        rank.agent.armed.append(fault.kind)

    def _node(self, fault: Fault) -> Node | None:
        nodes = self._schedule.contexts() if fault.kind in _AT_CONTEXTS else self._schedule.generations()
        return _pick([node for node in nodes if node.alive], fault.target)


def _pick(things: Sequence[Thing], target: float) -> Thing | None:
    return things[int(target * len(things))] if things else None
