"""What follows an outcome: decode, ask once more, compute the prompt here, fail. Remembers what was tried, no more.

failed, holder keeps its pages, retries left ──▶ RETRY (fresh pages, same attempt)
failed otherwise ──▶ RECOMPUTE or FAIL, as configured; told as early as the failure is known
its pages settle later ──▶ FREE
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvtransfer.config import OnFailure
from kvtransfer.ports import TransferFailure

if TYPE_CHECKING:
    from kvtransfer.ports import ReceiveOutcome, RequestKey


class Next(Enum):
    """What the scheduler does about an outcome. Pages of the receive may be used or freed unless it is WAIT, or the
    outcome was not settled."""

    # The cache is there.
    DECODE = auto()
    # Ask again with fresh pages: the old ones may be freed.
    RETRY = auto()
    # Compute the prompt here, on pages of its own.
    RECOMPUTE = auto()
    # Tell the client.
    FAIL = auto()
    # Everything has been said about the request; its pages come free now.
    FREE = auto()
    # Withdrawn by this side; the pages are not free yet.
    WAIT = auto()


@dataclass(frozen=True, slots=True)
class HandoffPolicy:
    """`retries`: how often a failed receive is repeated while the holder keeps its pages. `max_held_requests` and
    `max_held_blocks` (per rank) bound what finished prefills may hold on the context side. `timeout_s`: for all that a
    generation leg waits for, from its first word on; 0 = each wait has the hub's own."""

    retries: int = 0
    on_failure: OnFailure = OnFailure.FAIL
    max_held_requests: int = 1 << 30
    max_held_blocks: int = 1 << 62
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DisaggregatedParams:
    """How this build hands off, for the engine's own description of itself."""

    schedules: tuple[str, ...] = ("context_first", "generation_first")
    pipeline_transfer: bool = True
    transfer_buffer: bool = False


@dataclass(slots=True)
class _Tried:
    failures: list[str] = field(default_factory=list[str])
    retries: int = 0
    told: bool = False
    # The next receive is to come.
    waits: bool = False


class Receives:
    """What has been tried for each key that is being received. Not thread-safe."""

    def __init__(self, policy: HandoffPolicy) -> None:
        self._policy = policy
        self._tried: dict[RequestKey, _Tried] = {}

    def begin(self, key: RequestKey) -> bool:
        """A receive starts, the first one or one more. True when it may be repeated if it fails."""
        if self._policy.retries == 0:
            return False
        tried = self._tried.setdefault(key, _Tried())
        tried.waits = False
        return tried.retries < self._policy.retries

    def failures(self, key: RequestKey) -> tuple[str, ...]:
        """Reasons of the receives that have failed, for the report of the request."""
        tried = self._tried.get(key)
        return () if tried is None else tuple(tried.failures)

    def forget(self, key: RequestKey) -> bool:
        """The request is over. True when its holder still keeps pages for a retry that will not come."""
        tried = self._tried.pop(key, None)
        return tried is not None and tried.waits

    def decide(self, outcome: ReceiveOutcome) -> Next:
        """Once for each outcome, in order."""
        key, failure = outcome.key, outcome.failure
        tried = self._tried.setdefault(key, _Tried())
        if failure is TransferFailure.NONE:
            return Next.DECODE
        if tried.told or failure is TransferFailure.CANCELLED:
            return Next.FREE if outcome.settled else Next.WAIT
        tried.failures.append(outcome.reason or failure.name.lower().replace("_", " "))
        if outcome.may_retry and tried.retries < self._policy.retries:
            tried.retries += 1
            tried.waits = True
            return Next.RETRY
        return self.give_up(key)

    def give_up(self, key: RequestKey) -> Next:
        """No further receive: RECOMPUTE or FAIL."""
        self._tried.setdefault(key, _Tried()).told = True
        return Next.RECOMPUTE if self._policy.on_failure is OnFailure.RECOMPUTE else Next.FAIL
