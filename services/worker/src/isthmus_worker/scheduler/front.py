"""The schedulers of all attention-dp groups of an instance as one: each group has its own requests and its own cache,
and all of them compute in the same step.

    submit ──▶ one of the groups           plan: rows of group 0 | rows of group 1 | …  ──▶ one step of all ranks
    outcome ──▶ the group that has the request; a group without work joins with no rows
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from isthmus_core.errors import DuplicateRequest, InternalError
from isthmus_worker.engine import EngineLoad, EngineRequest, KvEvent
from isthmus_worker.scheduler.events import RequestReleased, SchedulerEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from isthmus_core.keys import RequestKey
    from isthmus_worker.runner import BatchRow, Drawn, ModelRunner
    from isthmus_worker.scheduler.answer import Answer
    from isthmus_worker.scheduler.scheduler import Scheduler
    from isthmus_worker.scheduler.step import StepPlan
    from kvtransfer.ports import HubToScheduler
    from kvtransfer.transceiver.scheduler import SchedulerTransceiver

# A prompt that is all in the cache of a group makes up for so many requests more that the group has: not for any
# number of them, or one popular beginning would leave the other groups idle.
_CACHED_PROMPT = 2.0


@dataclass(frozen=True, slots=True)
class JointPlan:
    """One step of all groups, `plans` by group."""

    plans: tuple[StepPlan, ...]

    @property
    def rows(self) -> list[BatchRow]:
        """All rows, group by group."""
        return [
            replace(row, dp_rank=group) if group else row for group, plan in enumerate(self.plans) for row in plan.rows
        ]

    @property
    def answers(self) -> list[Answer]:
        """What each row computes for."""
        return [answer for plan in self.plans for answer in plan.answers]

    def make_copies(self, runner: ModelRunner) -> None:
        """Before anything is computed."""
        for group, plan in enumerate(self.plans):
            plan.make_copies(runner, group)


class Front:
    """Looks like one `Scheduler` to the loop. `groups`: made by `make(emit, group)` for each group, with its
    transceiver, None on an instance that hands nothing off."""

    def __init__(
        self,
        emit: Callable[[SchedulerEvent], None],
        groups: int,
        make: Callable[[Callable[[SchedulerEvent], None], int], tuple[Scheduler, SchedulerTransceiver | None]],
    ) -> None:
        self._emit = emit
        self._group_of: dict[RequestKey, int] = {}
        # In how many groups a block can be found.
        self._stored: Counter[bytes] = Counter()
        made = [make(self._heard if groups > 1 else emit, group) for group in range(groups)]
        self._schedulers = tuple(scheduler for scheduler, _ in made)
        self._transceivers = tuple(transceiver for _, transceiver in made)

    @property
    def live(self) -> int:
        """Requests of which anything is left."""
        return sum(one.live for one in self._schedulers)

    def submit(self, request: EngineRequest, now: float) -> None:
        """See Scheduler."""
        if request.key in self._group_of:
            raise DuplicateRequest(request.key.request_id)
        if len(self._schedulers) == 1:
            self._schedulers[0].submit(request, now)
            return
        names = self._schedulers[0].prompt_names(request)
        group = min(range(len(self._schedulers)), key=lambda one: self._cost(one, request, names))
        self._schedulers[group].submit(request, now, names)
        self._group_of[request.key] = group

    def _cost(self, group: int, request: EngineRequest, names: Sequence[bytes]) -> float:
        """Of a request there, in requests that are there already."""
        scheduler = self._schedulers[group]
        return scheduler.live - _CACHED_PROMPT * scheduler.cached_share(request, names)

    def abort(self, key: RequestKey) -> None:
        """See Scheduler."""
        self._schedulers[self._group_of.get(key, 0)].abort(key)

    def deliver(self, message: HubToScheduler) -> None:
        """An outcome of a hand-off. It has no effect before `poll`."""
        transceiver = self._transceivers[self._group_of.get(message.key, 0)]
        if transceiver is None:
            raise InternalError(f"outcome of a hand-off for {message.key}, but this engine hands nothing off")
        transceiver.deliver(message)

    def poll(self) -> None:
        """See Scheduler."""
        for one in self._schedulers:
            one.poll()

    def plan(self, now: float) -> JointPlan:
        """See Scheduler."""
        return JointPlan(tuple(one.plan(now) for one in self._schedulers))

    def apply(self, step: JointPlan, drawn: Sequence[tuple[Drawn, ...]], failed: Collection[int], now: float) -> None:
        """See Scheduler. `drawn` and `failed` are about the rows of the joint step."""
        begin = 0
        for scheduler, plan in zip(self._schedulers, step.plans, strict=True):
            end = begin + len(plan.rows)
            own = frozenset(row - begin for row in failed if begin <= row < end)
            if plan.rows:
                scheduler.apply(plan, drawn[begin:end], own, now)
            begin = end

    def load(self) -> EngineLoad:
        """The sum over all groups."""
        first, *rest = (one.load() for one in self._schedulers)
        for load in rest:
            first = replace(
                first, **{one.name: getattr(first, one.name) + getattr(load, one.name) for one in fields(load)}
            )
        return first

    def check_idle(self) -> None:
        """See Scheduler."""
        for one in self._schedulers:
            one.check_idle()

    def _heard(self, event: SchedulerEvent) -> None:
        """Several groups speak as one instance: a block is gone when no group has it any more."""
        match event:
            case KvEvent(stored, removed):
                new = tuple(key for key in stored if self._stored[key] == 0)
                self._stored.update(stored)
                self._stored.subtract(removed)
                gone = tuple(key for key in removed if self._stored[key] <= 0)
                for key in gone:
                    del self._stored[key]
                if new or gone:
                    self._emit(KvEvent(new, gone))
            case RequestReleased(key):
                # Refused requests are released without ever having had a group.
                self._group_of.pop(key, None)
                self._emit(event)
            case _:
                self._emit(event)
