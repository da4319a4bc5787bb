"""One attempt on the generation side: its states, its transition table, what its writers have cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from isthmus_core.tracing import NOOP_SPAN, Span
from kvtransfer.manifest import Manifest, Need
from kvtransfer.ports import HandoffStats, TransferFailure, TransferStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.ports import ReceiveRequest, TransferNotice
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
    """`deadline`: of the state QUEUED first, then of the cache. `dead_at`: when the exited writers have drained."""

    request: ReceiveRequest
    peer: PeerId
    deadline: float
    since: float
    started: float
    state: ReceiveState = ReceiveState.QUEUED
    manifest: Manifest = field(default_factory=lambda: Manifest(Need.of({})))
    notices: list[TransferNotice] = field(default_factory=list["TransferNotice"])
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""
    dead_at: float | None = None
    span: Span = NOOP_SPAN

    def stats(self, now: float) -> HandoffStats:
        """What the hand-off has cost so far."""
        return HandoffStats(total_stats([notice.stats for notice in self.notices]), now - self.started)


def total_stats(parts: Sequence[TransferStats]) -> TransferStats:
    """Sums of bytes and descriptors, maxima of times, every path that was used."""
    return TransferStats(
        bytes=sum(one.bytes for one in parts),
        descriptors=sum(one.descriptors for one in parts),
        path=", ".join(sorted({one.path for one in parts if one.path})),
        queue=max((one.queue for one in parts), default=0.0),
        plan=max((one.plan for one in parts), default=0.0),
        post=max((one.post for one in parts), default=0.0),
        wire=max((one.wire for one in parts), default=0.0),
    )
