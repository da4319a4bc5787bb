"""When a request that failed gets another try: after which errors, how often, how soon, how many over all. Pure.

A try costs what the first one cost. In a cluster that fails under load, tries of everybody would double the load; so
the tries of all requests together are a bounded share of the requests (`RetryBudget`), whatever each one may have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message
from isthmus.v1 import errors_pb2

from isthmus_core.errors import DeadlineExceeded, IsthmusError, RequestCancelled

# Codes that say nothing about the request itself. INTERNAL is not among them: a bug must stay loud.
_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED})
_DETAILS = (
    errors_pb2.WorkerLost,
    errors_pb2.TransferFailed,
    errors_pb2.HandoffExpired,
    errors_pb2.NoCapacity,
    errors_pb2.Overloaded,
    errors_pb2.PeerIncompatible,
)


def worth_another(error: IsthmusError) -> bool:
    """True when the same request may well succeed on other instances, or on the same ones a moment later."""
    if isinstance(error, DeadlineExceeded | RequestCancelled):
        return False
    return isinstance(error.detail, _DETAILS) or (error.detail is None and error.code in _CODES)


_PHASES = {"prefill": "lost_in_prefill", "hand-off": "lost_in_handoff", "decode": "lost_in_decode"}
_WORDS: tuple[tuple[type[Message], str], ...] = (
    (errors_pb2.TransferFailed, "transfer_failed"),
    (errors_pb2.HandoffExpired, "handoff_expired"),
    (errors_pb2.NoCapacity, "no_capacity"),
    (errors_pb2.Overloaded, "overloaded"),
    (errors_pb2.PeerIncompatible, "incompatible"),
)


def reason_word(error: IsthmusError) -> str:
    """One of a dozen words for why a try ended: the label of a metric."""
    if isinstance(error.detail, errors_pb2.WorkerLost):
        return _PHASES.get(error.detail.phase, "lost")
    return next((word for kind, word in _WORDS if isinstance(error.detail, kind)), "unreachable")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_attempts` tries of one request in all. Before the second one no pause, then `pause_s`, doubled with each
    further one up to `longest_pause_s`; `budget_share`: tries after the first ones, as a share of all requests."""

    max_attempts: int = 3
    pause_s: float = 0.1
    longest_pause_s: float = 2.0
    budget_share: float = 0.2

    def pause(self, failures: int, random: float) -> float:
        """Seconds to wait after so many failed tries (at least 1); `random` in [0, 1) spreads them by half."""
        if failures < 2:
            return 0.0
        full = min(self.pause_s * 2.0 ** (failures - 2), self.longest_pause_s)
        return full * (0.5 + random / 2)


class RetryBudget:
    """Tries that all requests of this process may still have.

    Every request adds `share` of a try; the account holds at most `burst`, with which it starts, so that the loss of
    one worker of a quiet cluster costs nobody an answer. `refill_per_s` lets a quiet process recover.
    """

    def __init__(
        self, share: float, clock: Callable[[], float], *, burst: float = 100.0, refill_per_s: float = 1.0
    ) -> None:
        self._share, self._burst, self._refill, self._clock = share, burst, refill_per_s, clock
        self._left = burst if share else 0.0
        self._at = clock()

    def request(self) -> None:
        """A request has come."""
        self._left = min(self._burst, self._left + self._share)

    def take(self) -> bool:
        """One more try; False when there is none left."""
        now = self._clock()
        if self._share:
            self._left = min(self._burst, self._left + (now - self._at) * self._refill)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
