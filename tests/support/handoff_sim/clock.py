"""The clock, the random delays and the record of a schedule."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from .script import chunk_units, slow_scatters
from .violation import Violation


class World:
    """Virtual time in seconds. Everything that happens is an entry of one heap."""

    def __init__(self, seed: int, *, wire: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.wire = wire
        self.chunk_units, self.slow_scatters = chunk_units(seed), slow_scatters(seed)
        self._trace: list[tuple[float, str, tuple[object, ...]]] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Calls `action(*arguments)` after `delay` seconds. Ties keep the order of the calls."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, action, arguments))

    def latency(self, longest: float) -> float:
        """Mostly short, now and then long."""
        drawn = self.random.random()
        return drawn * longest if drawn < 0.95 else longest * 12 * self.random.random()

    def run(self, done: Callable[[], bool], horizon: float) -> None:
        """Until `done`; Violation when it has not come by `horizon`."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.steps += 1
            if self.steps % 8 == 0 and done():
                return
            time, _, action, arguments = pop(heap)
            if time > horizon:
                raise Violation(f"not over after {horizon:g} s")
            self.now = time
            action(*arguments)

    def note(self, what: str, *about: object) -> None:
        """One line of the trace."""
        self._trace.append((self.now, what, about))

    def trace(self, lines: int = 200) -> str:
        """What has happened, readable."""
        return "\n".join(
            f"{when:8.3f}  {what:28} {' '.join(map(str, about))}" for when, what, about in self._trace[-lines:]
        )
