"""What the scheduler role and the hub say to each other when both legs of a request start at once. See `ports`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.ports import Holder, RequestKey, TraceContext, TransferFailure

# --- scheduler role -> hub


@dataclass(frozen=True, slots=True)
class ReceiveIntent:
    """A generation leg waits for a context leg that was started at the same time. It has no pages yet."""

    key: RequestKey
    holder: Holder
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class BindContext:
    """The context leg of an attempt is scheduled on that attention-dp group; its chunks will be offered. It stays in
    flight until its `SendOutcome`."""

    key: RequestKey
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class SendFirstTokens:
    """What the prefill of a bound attempt has sampled; `payload` is what the two schedulers agree on."""

    key: RequestKey
    payload: bytes


# --- hub -> scheduler role


@dataclass(frozen=True, slots=True)
class Bound:
    """The context leg of a `ReceiveIntent` is scheduled: expose pages now."""

    key: RequestKey
    dp_rank: int


@dataclass(frozen=True, slots=True)
class FirstTokensArrived:
    """What the prefill of a `ReceiveIntent` has sampled. Its last news."""

    key: RequestKey
    payload: bytes


@dataclass(frozen=True, slots=True)
class BindFailed:
    """A `ReceiveIntent` has come to nothing. Its last news; a receive of the key has its own outcome."""

    key: RequestKey
    failure: TransferFailure
    reason: str


BindNews = Bound | FirstTokensArrived | BindFailed
