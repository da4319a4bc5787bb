"""One attempt on the context side: its states, its transition table, what is remembered of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvtransfer.ports import TransferFailure, TransferNotice, WriteOrder, WriterOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_core.tracing import Span
    from kvtransfer.messages import KvRequest
    from kvtransfer.ports import RequestKey, SendOffer
    from kvtransfer.session.actions import PeerId

Writer = tuple[int, int]


class TransmitState(Enum):
    """Where an attempt is."""

    OFFERED = auto()
    WRITING = auto()
    CANCELLING = auto()
    ENDED = auto()


class TransmitEvent(Enum):
    """What moves an attempt."""

    REQUESTED = auto()
    CANCELLED = auto()
    EXPIRED = auto()
    REFUSED = auto()
    ALL_OVER = auto()


TRANSITIONS: dict[tuple[TransmitState, TransmitEvent], TransmitState] = {
    (TransmitState.OFFERED, TransmitEvent.REQUESTED): TransmitState.WRITING,
    (TransmitState.OFFERED, TransmitEvent.CANCELLED): TransmitState.ENDED,
    (TransmitState.OFFERED, TransmitEvent.EXPIRED): TransmitState.ENDED,
    (TransmitState.OFFERED, TransmitEvent.REFUSED): TransmitState.ENDED,
    (TransmitState.WRITING, TransmitEvent.CANCELLED): TransmitState.CANCELLING,
    (TransmitState.WRITING, TransmitEvent.ALL_OVER): TransmitState.ENDED,
    (TransmitState.CANCELLING, TransmitEvent.CANCELLED): TransmitState.CANCELLING,
    (TransmitState.CANCELLING, TransmitEvent.ALL_OVER): TransmitState.ENDED,
}


@dataclass(slots=True, eq=False)
class Attempt:
    offer: SendOffer
    deadline: float
    since: float
    state: TransmitState = TransmitState.OFFERED
    peer: PeerId | None = None
    writers: dict[Writer, TransferNotice | None] = field(default_factory=dict[Writer, "TransferNotice | None"])
    spans: dict[Writer, Span] = field(default_factory=dict[Writer, "Span"])
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""

    @property
    def known(self) -> tuple[TransferNotice, ...]:
        """Notices that have come."""
        return tuple(notice for notice in self.writers.values() if notice is not None)

    @property
    def missing(self) -> tuple[Writer, ...]:
        """Writers that are not over."""
        return tuple(writer for writer, notice in self.writers.items() if notice is None)

    def result(self, event: TransmitEvent) -> tuple[TransferFailure, str]:
        """What the scheduler is told when `event` has ended the attempt."""
        failed = [notice for notice in self.known if notice.outcome is not WriterOutcome.DELIVERED]
        if event is TransmitEvent.ALL_OVER and not failed:
            return TransferFailure.NONE, ""
        if self.failure is TransferFailure.NONE:
            return TransferFailure.WRITE_FAILED, "; ".join(sorted({notice.reason for notice in failed}))
        return self.failure, self.reason


@dataclass(frozen=True, slots=True)
class Finished:
    """`peer` None: it was offered and nobody asked; whoever asks now is told `reason`. `offered` False: a tombstone.
    `lost`: the pages were not given up but could not be written."""

    peer: PeerId | None
    notices: tuple[TransferNotice, ...]
    reason: str
    offered: bool
    lost: bool = False


def never(key: RequestKey, writer: Writer, reason: str, *, not_held: bool = False) -> TransferNotice:
    """The writer has not started the attempt and never will."""
    return TransferNotice(key, *writer, WriterOutcome.NEVER_STARTED, reason=reason, not_held=not_held)


def write_orders(
    offer: SendOffer, peer: PeerId, request: KvRequest, writers: Sequence[Writer]
) -> list[tuple[int, WriteOrder]]:
    """One order for each writing rank, with its own sources and the destinations that it writes."""
    orders: list[tuple[int, WriteOrder]] = []
    for src in dict.fromkeys(src for src, _ in writers):
        targets = {dst for rank, dst in writers if rank == src}
        order = WriteOrder(
            key=offer.key,
            instance_id=peer[0],
            incarnation=peer[1],
            tokens=request.tokens,
            sources=tuple(blocks for blocks in offer.sources if blocks.rank == src),
            destinations=tuple(blocks for blocks in request.destinations if blocks.rank in targets),
        )
        orders.append((src, order))
    return orders
