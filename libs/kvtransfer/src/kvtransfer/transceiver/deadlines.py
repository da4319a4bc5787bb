"""One deadline for all that a generation leg waits for: its context leg, the cache, and the cache once more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey

# Of requests that end without a receive nobody says that they are over.
MOST_KNOWN = 1 << 14
# A request whose time is up is asked for all the same: the hub gives the answer that it is too late.
LEAST_S = 1e-3


class Deadlines:
    """`timeout_s` seconds for each key, 0 = none is set here. Not thread-safe."""

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._known: OrderedDict[RequestKey, float] = OrderedDict()

    def left(self, key: RequestKey) -> float:
        """Seconds that the request still has; they begin to run with the first question. 0 = no deadline here."""
        if not self._timeout_s:
            return 0.0
        now = self._clock()
        deadline = self._known.setdefault(key, now + self._timeout_s)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        return max(deadline - now, LEAST_S)

    def forget(self, key: RequestKey) -> None:
        """The request is over."""
        self._known.pop(key, None)
