"""What the scheduler says about requests: the values behind engine_ipc.proto's events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_worker.engine import KvEvent

if TYPE_CHECKING:
    from isthmus_core.errors import IsthmusError
    from isthmus_core.keys import RequestKey
    from isthmus_worker.engine import LegReport, Tokens


@dataclass(frozen=True, slots=True)
class RequestTokens:
    """New tokens of one answer of a request; its last ones carry the reason."""

    key: RequestKey
    chunk: Tokens


@dataclass(frozen=True, slots=True)
class RequestTookOver:
    """A generation leg goes on without its context leg. Comes before any of its tokens."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class ContextDone:
    """A context leg is over and its pages are offered. Ends the client's side, as RequestFinished does.

    `first_tokens`: one chunk per answer; no RequestTokens told them before. `dp_rank`: the attention-dp group that has
    the pages.
    """

    key: RequestKey
    first_tokens: tuple[Tokens, ...]
    report: LegReport
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The client's side of a request is over: every answer has ended, or `error` ended them all."""

    key: RequestKey
    error: IsthmusError | None
    report: LegReport


@dataclass(frozen=True, slots=True)
class RequestReleased:
    """Nothing of a request is left: no block, no queue entry. Comes after the end of the client's side."""

    key: RequestKey


SchedulerEvent = RequestTokens | RequestTookOver | ContextDone | RequestFinished | RequestReleased | KvEvent
