"""Who may go to the instances now: a bounded number of requests, the rest in a bounded, fair queue, more refused early.

A refusal costs next to nothing and names a time: how long the queue takes at the rate at which requests end just now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isthmus_core.errors import Overloaded
from isthmus_router.fair_queue import FairQueue
from isthmus_router.rules import AdmissionRule

_LEAST_HINT_S, _LONGEST_HINT_S = 0.1, 30.0
# How much one more ended request changes the measured time between two of them.
_WEIGHT = 0.1


class Admission:
    """One event loop owns it. Every `enter` that returns is followed by one `leave`."""

    def __init__(self, rule: AdmissionRule, clock: Callable[[], float]) -> None:
        self._rule, self._clock = rule, clock
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue()
        self._running = 0
        self._ended_at: float | None = None
        self._between_s = 0.0

    @property
    def running(self) -> int:
        """Requests that have entered and not left."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def check(self, tenant: str) -> None:
        """Raises Overloaded when a request of this tenant could not even wait."""
        if self._running < self._rule.max_running:
            return
        if len(self._queue) >= self._rule.max_waiting:
            # Without a queue the limit that was met is the number of places.
            raise Overloaded("the router", self._rule.max_waiting or self._rule.max_running, self._hint_s())
        if self._queue.waiting(tenant) >= self._rule.max_waiting_per_tenant:
            name = f"the router's queue of tenant {tenant!r}" if tenant else "the router's queue of unnamed tenants"
            raise Overloaded(name, self._rule.max_waiting_per_tenant, self._hint_s())

    async def enter(self, tenant: str, cost: float, timeout_s: float) -> None:
        """Wait for a place. `cost`: tokens that the request may take. Raises Overloaded."""
        if self._running < self._rule.max_running and not len(self._queue):
            self._running += 1
            return
        self.check(tenant)
        turn = asyncio.get_running_loop().create_future()
        self._queue.push(tenant, turn, max(cost, 1.0))
        try:
            async with asyncio.timeout(min(timeout_s, self._rule.max_wait_s)):
                await turn
        except BaseException as error:
            if not self._queue.remove(turn):
                self.leave()  # the turn came while the wait was ending
            if isinstance(error, TimeoutError):
                raise Overloaded("the router", self._rule.max_running, self._hint_s()) from None
            raise

    def leave(self) -> None:
        """A request is over."""
        now = self._clock()
        if self._ended_at is not None:
            self._between_s += _WEIGHT * (now - self._ended_at - self._between_s)
        self._ended_at = now
        turn = self._queue.pop()
        if turn is None:
            self._running -= 1
        else:
            turn.set_result(None)

    def _hint_s(self) -> float:
        wait_s = self._between_s * (len(self._queue) + 1)
        return round(min(max(wait_s, _LEAST_HINT_S), _LONGEST_HINT_S), 3)
