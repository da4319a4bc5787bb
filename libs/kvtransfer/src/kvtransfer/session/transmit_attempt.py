"""One attempt on the context side: its states, its transition table, and how far each writer is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvtransfer.errors import ProtocolError
from kvtransfer.ports import TokenRange, TransferFailure, TransferNotice, WriteOrder, WriterOutcome
from kvtransfer.session.stats import total_stats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isthmus_core.tracing import Span
    from kvtransfer.messages import KvRequest, TransferLimits
    from kvtransfer.ports import RequestKey, SendOffer
    from kvtransfer.session.actions import PeerId

Writer = tuple[int, int]


class TransmitState(Enum):
    """Where an attempt is."""

    # Pages are held, or will be: nobody has asked for them, or asks again after a failure.
    OFFERED = auto()
    # A peer has asked: what is computed is written.
    WRITING = auto()
    # No longer wanted; nothing new is ordered.
    CANCELLING = auto()
    ENDED = auto()


class TransmitEvent(Enum):
    """What moves an attempt."""

    REQUESTED = auto()
    CANCELLED = auto()
    EXPIRED = auto()
    REFUSED = auto()
    ALL_OVER = auto()
    # Every writer is over, not everything was delivered, and the peer may ask once more.
    KEPT = auto()


TRANSITIONS: dict[tuple[TransmitState, TransmitEvent], TransmitState] = {
    (TransmitState.OFFERED, TransmitEvent.REQUESTED): TransmitState.WRITING,
    (TransmitState.OFFERED, TransmitEvent.CANCELLED): TransmitState.ENDED,
    (TransmitState.OFFERED, TransmitEvent.EXPIRED): TransmitState.ENDED,
    (TransmitState.OFFERED, TransmitEvent.REFUSED): TransmitState.ENDED,
    (TransmitState.WRITING, TransmitEvent.CANCELLED): TransmitState.CANCELLING,
    (TransmitState.WRITING, TransmitEvent.ALL_OVER): TransmitState.ENDED,
    (TransmitState.WRITING, TransmitEvent.KEPT): TransmitState.OFFERED,
    (TransmitState.CANCELLING, TransmitEvent.CANCELLED): TransmitState.CANCELLING,
    (TransmitState.CANCELLING, TransmitEvent.ALL_OVER): TransmitState.ENDED,
}


@dataclass(frozen=True, slots=True)
class TransmitPeer:
    """What is agreed with a generation instance: who writes to whom, and how much may be asked for. `groups`: the
    attention-dp group of each writing rank that is not in group 0."""

    writers: tuple[Writer, ...]
    limits: TransferLimits
    groups: Mapping[int, int] = field(default_factory=dict[int, int])

    def serving(self, request: KvRequest) -> tuple[Writer, ...]:
        """Who would write what is asked for. Raises ProtocolError for destinations that the peer does not have."""
        ranks = {blocks.rank for blocks in request.destinations}
        writers = [one for one in self.writers if self.groups.get(one[0], 0) == request.src_dp]
        unknown = ranks - {dst for _, dst in writers}
        if unknown:
            text = f"KvRequest {request.key} names ranks {sorted(unknown)}, which nobody"
            raise ProtocolError(f"{text} of attention-dp group {request.src_dp} here writes to")
        return tuple(one for one in writers if one[1] in ranks)


@dataclass(slots=True, eq=False)
class Progress:
    """One writer: orders that are open, what the others have said, the last word when there is one."""

    open: int = 0
    parts: list[TransferNotice] = field(default_factory=list[TransferNotice])
    final: TransferNotice | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """`deadline` counts while nobody asks and no chunk is missing. `bound`: a peer could ask before there was a chunk;
    they count from 1 then. `dp_rank`: the attention-dp group that holds the pages. `asked` and what follows belong to
    one KvRequest."""

    key: RequestKey
    deadline: float
    since: float
    chunks: list[SendOffer] = field(default_factory=list["SendOffer"])
    more: bool = False
    bound: bool = False
    dp_rank: int = 0
    state: TransmitState = TransmitState.OFFERED
    peer: PeerId | None = None
    asked: KvRequest | None = None
    writers: dict[Writer, Progress] = field(default_factory=dict[Writer, Progress])
    spans: dict[Writer, Span] = field(default_factory=dict[Writer, "Span"])
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""
    # Cancelled while chunks were to come: what was delivered is not the whole.
    cut_short: bool = False
    # Its ranks are being killed.
    fenced: bool = False

    @property
    def receive(self) -> int:
        """Number of the KvRequest that is served, 0 for none."""
        return 0 if self.asked is None else self.asked.receive

    @property
    def known(self) -> tuple[TransferNotice, ...]:
        """Writers' last words that have come."""
        return tuple(one.final for one in self.writers.values() if one.final is not None)

    @property
    def missing(self) -> tuple[Writer, ...]:
        """Writers that are not over."""
        return tuple(writer for writer, one in self.writers.items() if one.final is None)

    @property
    def pages(self) -> int:
        """Pages that are held; a later chunk lists those of the earlier ones as well."""
        held: dict[tuple[int, int], int] = {}
        for chunk in self.chunks:
            for blocks in chunk.sources:
                place = (blocks.rank, blocks.layer_group)
                held[place] = max(held.get(place, 0), len(blocks.blocks))
        return sum(held.values())

    def is_stuck(self, since: float) -> bool:
        """True when it was cancelled before `since`, its writers are not over and nothing has been done about it."""
        return self.state is TransmitState.CANCELLING and self.since <= since and not self.fenced

    def has_rank(self, rank: int) -> bool:
        """True when pages of the rank are held."""
        return any(blocks.rank == rank for chunk in self.chunks for blocks in chunk.sources)

    def result(self, event: TransmitEvent) -> tuple[TransferFailure, str]:
        """What the scheduler is told when `event` has ended the attempt."""
        failed = [notice for notice in self.known if notice.outcome is not WriterOutcome.DELIVERED]
        if event is TransmitEvent.ALL_OVER and not failed:
            return TransferFailure.NONE, ""
        if self.failure is TransferFailure.NONE:
            return TransferFailure.WRITE_FAILED, "; ".join(sorted({notice.reason for notice in failed}))
        return self.failure, self.reason


def never(key: RequestKey, writer: Writer, reason: str, *, receive: int = 0, not_held: bool = False) -> TransferNotice:
    """The writer has not started the attempt and never will."""
    outcome = WriterOutcome.NEVER_STARTED
    return TransferNotice(key, *writer, outcome, reason=reason, not_held=not_held, receive=receive)


def last_word(key: RequestKey, receive: int, writer: Writer, parts: Sequence[TransferNotice]) -> TransferNotice:
    """One notice over all chunks of a writer. Without any it was never started: nothing was ordered."""
    if not parts:
        return never(key, writer, "cancelled before anything was ordered", receive=receive)
    if len(parts) == 1:
        return parts[0]._replace(receive=receive)
    outcomes = {part.outcome for part in parts}
    outcome = outcomes.pop() if len(outcomes) == 1 else WriterOutcome.QUIESCED
    reason = "; ".join(dict.fromkeys(part.reason for part in parts if part.reason))
    extents = tuple(extent for part in parts for extent in part.extents)
    stats = total_stats([part.stats for part in parts])
    chunks = sum(part.chunks for part in parts)
    return TransferNotice(key, *writer, outcome, extents, reason, stats, receive=receive, chunks=chunks)


def write_orders(
    chunk: SendOffer, peer: PeerId, request: KvRequest, writers: Sequence[Writer]
) -> list[tuple[int, WriteOrder]]:
    """One order for each writing rank, with its own sources and the destinations that it writes. None when the chunk
    holds nothing of what is asked for."""
    begin, end = max(chunk.tokens.begin, request.tokens.begin), min(chunk.tokens.end, request.tokens.end)
    whole = chunk.chunk == 0 and not chunk.more
    if begin >= end and not whole:
        return []
    orders: list[tuple[int, WriteOrder]] = []
    for src in dict.fromkeys(src for src, _ in writers):
        targets = {dst for rank, dst in writers if rank == src}
        order = WriteOrder(
            key=request.key,
            instance_id=peer[0],
            incarnation=peer[1],
            tokens=request.tokens,
            sources=tuple(blocks for blocks in chunk.sources if blocks.rank == src),
            destinations=tuple(blocks for blocks in request.destinations if blocks.rank in targets),
            receive=request.receive,
            window=None if whole else TokenRange(begin, end),
            step=chunk.step,
        )
        orders.append((src, order))
    return orders


def limit_problem(limits: TransferLimits, request: KvRequest, open_requests: int) -> str:
    """Why a KvRequest goes beyond what was agreed; empty when it does not."""
    if open_requests >= limits.max_open_requests:
        return f"{open_requests} requests of this peer are open, at most {limits.max_open_requests} may be"
    ids = sum(len(blocks.blocks) for blocks in request.destinations)
    if ids > limits.max_block_ids:
        return f"the request names {ids} blocks, at most {limits.max_block_ids} may be"
    return ""
