"""How fast the queue moves, measured."""

from __future__ import annotations

from collections import deque

_ADMISSIONS = 32
_SHORTEST_S, _LONGEST_S = 1.0, 60.0


class ServiceRate:
    """Remembers when the last requests left the queue. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._admitted: deque[float] = deque(maxlen=_ADMISSIONS)

    def note(self, now: float) -> None:
        """A request has left the queue."""
        self._admitted.append(now)

    def wait_s(self, waiting: int, now: float) -> float:
        """Seconds after which `waiting` requests will have left the queue, in [1, 60]; 1 while nothing is known.

        Measured up to now, not up to the last admission: a queue that has come to a stop is no fast one.
        """
        if len(self._admitted) < 2:
            return _SHORTEST_S
        a_request_s = (now - self._admitted[0]) / len(self._admitted)
        return min(max(waiting * a_request_s, _SHORTEST_S), _LONGEST_S)
