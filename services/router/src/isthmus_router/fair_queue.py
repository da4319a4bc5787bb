"""A queue in which tenants take turns by what their requests cost. Pure.

Start-time fair queuing: every item gets a tag on a virtual clock, which begins where the tenant's last item ends and
advances by the item's cost; the item with the least tag is next. A tenant that asks for much waits behind itself; one
that comes seldom is served at once. Between tenants that always wait the costs served are equal, up to one item each.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of tenants. Costs are above 0; items must be hashable and there once at most."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._tenants: dict[T, str] = {}
        self._waiting: Counter[str] = Counter()
        # Where the tenant's last item ends on the virtual clock; forgotten when the queue runs empty.
        self._ends: dict[str, float] = {}
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._tenants)

    def waiting(self, tenant: str) -> int:
        """Items of one tenant."""
        return self._waiting[tenant]

    def push(self, tenant: str, item: T, cost: float) -> None:
        """Put an item in."""
        begin = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = begin + cost
        heapq.heappush(self._heap, (begin, self._count, item))
        self._count += 1
        self._tenants[item] = tenant
        self._waiting[tenant] += 1

    def pop(self) -> T | None:
        """Take out whose turn it is; None when nobody waits."""
        while self._heap:
            self._now, _, item = heapq.heappop(self._heap)
            if item in self._tenants:
                self._forget(item)
                return item
        return None

    def remove(self, item: T) -> bool:
        """Take out an item that no longer waits; False when it is not there."""
        if item not in self._tenants:
            return False
        self._forget(item)
        if len(self._heap) > 2 * len(self._tenants) + 64:
            self._heap = [entry for entry in self._heap if entry[2] in self._tenants]
            heapq.heapify(self._heap)
        return True

    def _forget(self, item: T) -> None:
        tenant = self._tenants.pop(item)
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not self._tenants:
            self._heap.clear()
            self._ends.clear()
            self._now = 0.0
