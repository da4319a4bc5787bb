"""Placement without a trip to the coordinator: in turn, or the less loaded of two drawn candidates. Pure.

What is known comes from the coordinator's stream of members and ready pairs, a moment late; the load of this router's
own requests is exact.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus_core.errors import NoCapacity
from isthmus_router.cluster_watch import ClusterView, WatchedMember
from isthmus_router.coordinator_messages import InstanceRef, Placement
from isthmus_router.ports import PlacementRequest, Shape

UNSPLIT = "context_and_generation"


@dataclass(frozen=True, slots=True)
class Unit:
    """Who may compute a prompt, and the generation instances that may go on with it; `context` None: each of
    `generations` does everything alone."""

    context: WatchedMember | None
    generations: tuple[WatchedMember, ...]


def units_of(view: ClusterView) -> dict[str, tuple[Unit, ...]]:
    """Units by model, in the order of their names."""
    partners: dict[str, list[WatchedMember]] = {}
    contexts: dict[str, WatchedMember] = {}
    for context, generation in view.ready_pairs():
        contexts[context.instance_id] = context
        partners.setdefault(context.instance_id, []).append(generation)
    found: dict[str, list[Unit]] = {}
    for name in sorted(contexts):
        generations = tuple(sorted(partners[name], key=lambda one: one.instance_id))
        found.setdefault(contexts[name].model, []).append(Unit(contexts[name], generations))
    for member in sorted(view.members(), key=lambda one: one.instance_id):
        if member.usable and member.role == UNSPLIT:
            found.setdefault(member.model, []).append(Unit(None, (member,)))
    return {model: tuple(units) for model, units in found.items()}


def allowed(units: Sequence[Unit], question: PlacementRequest) -> list[Unit]:
    """Units that a request may use. Raises NoCapacity."""
    wanted = {Shape.ANY: (True, False), Shape.SPLIT: (True,), Shape.UNSPLIT: (False,)}[question.shape]
    fitting = [unit for unit in units if (unit.context is not None) in wanted]
    if not question.excluded:
        left = fitting
    else:
        excluded = frozenset(question.excluded)
        left = [
            Unit(unit.context, rest)
            for unit in fitting
            if (unit.context is None or unit.context.incarnation not in excluded)
            and (rest := tuple(one for one in unit.generations if one.incarnation not in excluded))
        ]
    if not left:
        kind = "instance" if question.shape is Shape.UNSPLIT else "instance or connected pair of instances"
        others = f" besides {len(question.excluded)} that failed" if question.excluded and fitting else ""
        raise NoCapacity(f"no {kind} serves {question.model}{others}")
    return left


class RoundRobin:
    """Each context instance in turn, and each of its generation instances in turn."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turns: Counter[str] = Counter()

    def choose(self, units: Sequence[Unit], model: str) -> tuple[WatchedMember | None, WatchedMember]:
        """Of units that are not empty."""
        turn = self._turns[model]
        self._turns[model] += 1
        unit = units[turn % len(units)]
        return unit.context, unit.generations[turn // len(units) % len(unit.generations)]


class PowerOfTwo:
    """Of two drawn candidates the one with less to do. `own`: this router's requests, by incarnation."""

    name = "power_of_two"

    def __init__(self, own: Callable[[bytes], int], draw: random.Random) -> None:
        self._own, self._draw = own, draw

    def choose(self, units: Sequence[Unit], model: str) -> tuple[WatchedMember | None, WatchedMember]:
        """Of units that are not empty."""
        drawn = [self._draw.choice(units) for _ in range(2)]
        pairs = [(unit.context, self._draw.choice(unit.generations)) for unit in drawn]
        return min(pairs, key=lambda pair: sum(self._busy(one) for one in pair if one is not None))

    def _busy(self, member: WatchedMember) -> int:
        # What it reports includes most of this router's requests, but late: the larger number is nearer the truth.
        return max(member.running_requests + member.waiting_requests, self._own(member.incarnation))


def placement(context: WatchedMember | None, generation: WatchedMember, policy: str, candidates: int) -> Placement:
    """As the coordinator would say it."""
    kind = "unsplit" if context is None else "split"
    return Placement(None if context is None else _ref(context), _ref(generation), kind, policy, candidates)


def _ref(member: WatchedMember) -> InstanceRef:
    return InstanceRef(member.instance_id, member.incarnation, member.endpoint)
