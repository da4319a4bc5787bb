"""One attempt on the generation side: its states, its transition table, what its writers have cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from isthmus_core.tracing import NOOP_SPAN, Span
from kvtransfer.manifest import Manifest, Need
from kvtransfer.messages import ReceiveKey
from kvtransfer.ports import HandoffStats, TransferFailure
from kvtransfer.session.stats import total_stats

if TYPE_CHECKING:
    from kvtransfer.ports import ReceiveRequest, RequestKey, TransferNotice
    from kvtransfer.session.actions import PeerId


class ReceiveState(Enum):
    """Where an attempt is."""

    # Pages are reserved, the stream to the holder is not ready.
    QUEUED = auto()
    # Pages are exposed, writers are at work.
    WAITING = auto()
    # As WAITING, but the stream is broken: the writers can not be asked.
    DOUBT = auto()
    # Failed or cancelled; pages stay exposed until every writer is over.
    FAILING = auto()
    # As FAILING, but the stream is broken.
    FAILING_DOUBT = auto()
    ENDED = auto()


class ReceiveEvent(Enum):
    """What moves an attempt."""

    PUBLISHED = auto()
    COMPLETE = auto()
    # Every writer is over, the manifest is not complete.
    ALL_OVER = auto()
    FAILED = auto()
    CANCELLED = auto()
    STREAM_BROKE = auto()
    # Reconcile says that writers are still at work.
    RECONCILED = auto()
    # Exit report of the writers' incarnation, and the fabric has drained.
    WRITERS_DEAD = auto()


_S, _E = ReceiveState, ReceiveEvent
TRANSITIONS: dict[tuple[ReceiveState, ReceiveEvent], ReceiveState] = {
    (_S.QUEUED, _E.PUBLISHED): _S.WAITING,
    (_S.QUEUED, _E.FAILED): _S.ENDED,
    (_S.QUEUED, _E.CANCELLED): _S.ENDED,
    (_S.WAITING, _E.COMPLETE): _S.ENDED,
    (_S.WAITING, _E.ALL_OVER): _S.ENDED,
    (_S.WAITING, _E.FAILED): _S.FAILING,
    (_S.WAITING, _E.CANCELLED): _S.FAILING,
    (_S.WAITING, _E.STREAM_BROKE): _S.DOUBT,
    (_S.DOUBT, _E.COMPLETE): _S.ENDED,
    (_S.DOUBT, _E.ALL_OVER): _S.ENDED,
    (_S.DOUBT, _E.FAILED): _S.FAILING_DOUBT,
    (_S.DOUBT, _E.CANCELLED): _S.FAILING_DOUBT,
    (_S.DOUBT, _E.RECONCILED): _S.WAITING,
    (_S.FAILING, _E.ALL_OVER): _S.ENDED,
    (_S.FAILING, _E.STREAM_BROKE): _S.FAILING_DOUBT,
    (_S.FAILING, _E.WRITERS_DEAD): _S.ENDED,
    (_S.FAILING_DOUBT, _E.ALL_OVER): _S.ENDED,
    (_S.FAILING_DOUBT, _E.RECONCILED): _S.FAILING,
    (_S.FAILING_DOUBT, _E.WRITERS_DEAD): _S.ENDED,
}

IN_DOUBT = (ReceiveState.DOUBT, ReceiveState.FAILING_DOUBT)
FAILED = (ReceiveState.FAILING, ReceiveState.FAILING_DOUBT)
# The request may be or become known to the holder.
PUBLISHED = (ReceiveState.WAITING, ReceiveState.DOUBT, ReceiveState.FAILING, ReceiveState.FAILING_DOUBT)


@dataclass(slots=True, eq=False)
class Attempt:
    """`deadline`: of the state QUEUED first, then `limit`, that of the cache. `dead_at`: when the writers of
    `dead_ranks` (None: all), which have exited, have drained. `fence_at`: when their hub is asked (again) to make an
    end."""

    request: ReceiveRequest
    peer: PeerId
    deadline: float
    limit: float
    since: float
    started: float
    state: ReceiveState = ReceiveState.QUEUED
    manifest: Manifest = field(default_factory=lambda: Manifest(Need.of({})))
    notices: list[TransferNotice] = field(default_factory=list["TransferNotice"])
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""
    dead_at: float | None = None
    dead_ranks: frozenset[int] | None = frozenset()
    fence_at: float | None = None
    fences: int = 0
    leaked: bool = False
    span: Span = NOOP_SPAN
    # Number of the KvRequest, 0 before it is said.
    receive: int = 0

    @property
    def key(self) -> RequestKey:
        """Of the request."""
        return self.request.key

    @property
    def name(self) -> ReceiveKey:
        """How the holder knows it."""
        return ReceiveKey(self.request.key, self.receive)

    def stats(self, now: float) -> HandoffStats:
        """What the hand-off has cost so far."""
        return HandoffStats(total_stats([notice.stats for notice in self.notices]), now - self.started)
