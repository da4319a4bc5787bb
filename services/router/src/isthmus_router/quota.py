"""How much one client may ask for, as token buckets. Pure: the clock is given."""

from __future__ import annotations

import math
from collections.abc import Callable

from isthmus_core.errors import RateLimited

_S_PER_MIN = 60.0


class Bucket:
    """A token bucket that may be overdrawn: what something costs is often known only when it is done.

    It fills by `rate` a second up to `capacity`; something may begin while there is anything (`least`) in it.
    """

    def __init__(self, rate: float, capacity: float, clock: Callable[[], float]) -> None:
        self._rate, self._capacity, self._clock = rate, capacity, clock
        self._level, self._at = capacity, clock()

    def wait_s(self, least: float) -> float:
        """Seconds until `least` is in it; 0 when it is."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (least - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Take out, whether it is there or not."""
        self._level -= amount


class Quota:
    """What one client may ask of this process. None: as much as it likes.

    Requests: a second's worth (at least one) may come at once. Tokens: a minute's worth; the prompt is paid when it is
    known, the answer when it is over, so one may be overdrawn by what runs, which the client then waits for.
    """

    def __init__(self, requests_per_s: float | None, tokens_per_min: float | None, clock: Callable[[], float]) -> None:
        self.limits = (requests_per_s, tokens_per_min)
        self._requests = Bucket(requests_per_s, max(1.0, requests_per_s), clock) if requests_per_s else None
        self._tokens = Bucket(tokens_per_min / _S_PER_MIN, tokens_per_min, clock) if tokens_per_min else None

    def count_request(self) -> None:
        """One more request. Raises RateLimited."""
        if self._requests is None:
            return
        wait_s = self._requests.wait_s(1.0)
        if wait_s > 0:
            raise _limited("requests_per_s", self.limits[0], wait_s)
        self._requests.take(1.0)

    def check_tokens(self) -> None:
        """Raises RateLimited while the tokens that were used have not been earned."""
        if self._tokens is None:
            return
        # A whole token: what a fraction of one allowed would be refused again.
        wait_s = self._tokens.wait_s(1.0)
        if wait_s > 0:
            raise _limited("tokens_per_min", self.limits[1], wait_s)

    def spend_tokens(self, tokens: int) -> None:
        """Tokens of a prompt or of an answer."""
        if self._tokens is not None:
            self._tokens.take(tokens)


def _limited(limit: str, allowed: float | None, wait_s: float) -> RateLimited:
    return RateLimited(limit, allowed or 0.0, math.ceil(wait_s * 1000) / 1000)
