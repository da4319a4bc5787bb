"""A circuit breaker for each start of an instance: who fails again and again gets no requests for a while. Pure.

The coordinator sees whether an instance is a member, and how loaded it is; only the router sees that calls of a member
fail. An open breaker is advice: when nobody else is there, the request goes to the instance all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_MAX_INSTANCES = 4096


@dataclass(slots=True)
class _State:
    failures: int = 0
    openings: int = 0
    open_until: float = 0.0


class Breakers:
    """Breakers of the instances that have failed lately, by incarnation.

    `threshold` failures in a row open one for `cool_down_s` seconds. After that requests are let through again; a
    failure opens it at once for twice as long, up to `longest_s`; a success forgets everything.
    """

    def __init__(
        self, clock: Callable[[], float], *, threshold: int = 3, cool_down_s: float = 1.0, longest_s: float = 30.0
    ) -> None:
        self._clock = clock
        self._threshold, self._cool_down_s, self._longest_s = threshold, cool_down_s, longest_s
        self._states: OrderedDict[bytes, _State] = OrderedDict()

    def failed(self, incarnation: bytes) -> bool:
        """A call failed; True when that opened the breaker."""
        state = self._states.setdefault(incarnation, _State())
        self._states.move_to_end(incarnation)
        if len(self._states) > _MAX_INSTANCES:
            self._states.popitem(last=False)
        state.failures += 1
        now = self._clock()
        if state.failures < self._threshold or now < state.open_until:
            return False
        state.open_until = now + min(self._cool_down_s * 2.0**state.openings, self._longest_s)
        # One failure is enough to open it again.
        state.failures = self._threshold - 1
        state.openings = min(state.openings + 1, 16)
        return True

    def succeeded(self, incarnation: bytes) -> None:
        """A call went well."""
        self._states.pop(incarnation, None)

    def open(self) -> tuple[bytes, ...]:
        """Incarnations that shall get nothing now."""
        if not self._states:
            return ()
        now = self._clock()
        return tuple(incarnation for incarnation, state in self._states.items() if now < state.open_until)
