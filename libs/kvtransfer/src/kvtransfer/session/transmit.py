"""The context side of a hand-off: offers of the scheduler joined with requests of peers.

    offer ─▶ OFFERED ── KvRequest ─▶ WRITING ── every writer over ─▶ ENDED
               │                        │ cancel                      ▲
               │ cancel, expiry         ▼                             │
               │                    CANCELLING ── every writer over ──┤
               └──────────────────────────────────────────────────────┘

What has ended is remembered for a while with its notices: a late cancel or a Reconcile gets the recorded answer. An
attempt that was answered NEVER_STARTED before it was offered is remembered as well (a tombstone), so that it is not
started later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.messages import ReconcileReply, SessionView
from kvtransfer.ports import (
    CancelWrite,
    SendOutcome,
    TransferFailure,
    TransferNotice,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToRank, ToScheduler
from kvtransfer.session.transmit_attempt import (
    TRANSITIONS,
    Attempt,
    Finished,
    TransmitEvent,
    TransmitState,
    Writer,
    never,
    write_orders,
)
from kvtransfer.tracing import begin_transfer, end_transfer

if TYPE_CHECKING:
    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.messages import KvRequest, TransferLimits
    from kvtransfer.ports import RequestKey, SendOffer, WriteOrder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransmitPeer:
    """What is agreed with a generation instance: who writes to whom, and how much may be asked for."""

    writers: tuple[Writer, ...]
    limits: TransferLimits


class TransmitSessions:
    """All attempts of one context instance. `emit` must not call back."""

    def __init__(self, config: TransferConfig, emit: Emit, tracing: Tracing) -> None:
        self._config, self._emit, self._tracing = config, emit, tracing
        self._open: dict[RequestKey, Attempt] = {}
        self._finished: OrderedDict[RequestKey, Finished] = OrderedDict()
        self._peers: dict[PeerId, TransmitPeer] = {}
        self._exited: dict[int, tuple[float, str]] = {}

    # --- the scheduler

    def offer(self, offer: SendOffer, now: float) -> None:
        """Holds pages until somebody asks for them, at most `handoff_hold_s`. Raises TransferStateError for a key that
        is held already."""
        if offer.key in self._open:
            raise TransferStateError(offer.key, "is offered already")
        finished = self._finished.pop(offer.key, None)
        if finished is not None and not finished.offered:
            self._emit(ToScheduler(SendOutcome(offer.key, TransferFailure.CANCELLED, finished.reason)))
            return
        self._open[offer.key] = Attempt(offer, now + self._config.handoff_hold_s, now)

    def withdraw(self, key: RequestKey, now: float) -> None:
        """The scheduler no longer offers the attempt. Nothing happens when it is over: its outcome is on its way."""
        attempt = self._open.get(key)
        if attempt is not None:
            self._cancel(attempt, "withdrawn by the context instance", now)

    # --- peers

    def meet(self, peer: PeerId, terms: TransmitPeer) -> None:
        """A peer may ask from now on."""
        self._peers[peer] = terms

    def forget(self, peer: PeerId) -> None:
        """A peer is gone for good. It must not have open attempts."""
        self._peers.pop(peer, None)

    def request(self, peer: PeerId, request: KvRequest, now: float) -> None:
        """Starts the writes, or answers for every writer that they never start. A repeat gets what is known so far, one
        after the end is refused: its pages are others, and only Reconcile asks about the old ones.
        Raises ProtocolError for destinations that the peer does not have."""
        ranks = {blocks.rank for blocks in request.destinations}
        unknown = ranks - {dst for _, dst in self._peers[peer].writers}
        if unknown:
            raise ProtocolError(f"KvRequest {request.key} names ranks {sorted(unknown)}, which nobody here writes to")
        writers = tuple(writer for writer in self._peers[peer].writers if writer[1] in ranks)
        key, attempt = request.key, self._open.get(request.key)
        if attempt is not None and attempt.peer is None:
            problem = self._problem(peer, request, writers)
            if problem:
                self._refuse(attempt, peer, writers, problem, now)
            else:
                self._start(attempt, peer, request, writers, now)
            return
        finished = self._finished.get(key)
        if attempt is None and finished is not None and finished.offered and finished.peer == peer:
            # A new receive under an old key: what was delivered lies in pages that the peer has freed since.
            reason = "the pages have been handed off already: use a new attempt"
            notices = tuple(never(key, writer, reason, not_held=True) for writer in writers)
            self._remember(key, Finished(peer, notices, reason, offered=True))
        for notice in self._answer(peer, key, writers, "the pages were never offered"):
            self._emit(ToPeer(peer, notice))

    def cancel(self, peer: PeerId, key: RequestKey, now: float) -> None:
        """The peer no longer wants the attempt. Every writer still answers; what is known is said again."""
        attempt = self._open.get(key)
        reason = "cancelled by the generation instance"
        if attempt is not None and attempt.peer == peer:
            self._cancel(attempt, reason, now)
            return
        if attempt is not None and attempt.peer is None:
            self._refuse(attempt, peer, self._peers[peer].writers, reason, now, failure=TransferFailure.CANCELLED)
            return
        for notice in self._answer(peer, key, self._peers[peer].writers, reason):
            self._emit(ToPeer(peer, notice))

    def reconcile(self, peer: PeerId, keys: Iterable[RequestKey], now: float) -> None:
        """Says of each attempt what is over and what is being written. What was never seen will never be started.
        Raises ProtocolError for more keys than the peer may have open."""
        keys = tuple(keys)
        limit = self._peers[peer].limits.max_open_requests
        if len(keys) > limit:
            raise ProtocolError(f"Reconcile names {len(keys)} attempts, at most {limit} may be open")
        in_flight: list[RequestKey] = []
        notices: list[TransferNotice] = []
        for key in keys:
            attempt = self._open.get(key)
            if attempt is not None and attempt.peer is None:
                reason = "the request was lost with the old stream"
                failure = TransferFailure.CANCELLED
                notices += self._end_unasked(attempt, peer, self._peers[peer].writers, reason, now, failure)
                continue
            if attempt is not None and attempt.peer == peer and attempt.missing:
                in_flight.append(key)
            notices += self._answer(peer, key, self._peers[peer].writers, "never seen before the stream broke")
        self._emit(ToPeer(peer, ReconcileReply(tuple(in_flight), tuple(notices))))

    # --- ranks

    def notice(self, rank: int, notice: TransferNotice, now: float) -> None:
        """One writer of a rank is over. Late and repeated notices change nothing."""
        attempt = self._open.get(notice.key)
        writer = (rank, notice.dst_rank)
        if notice.src_rank != rank or attempt is None or attempt.writers.get(writer, notice) is not None:
            log.debug("notice of rank %d for attempt %s is not waited for", rank, notice.key)
            return
        self._over(attempt, notice, now)

    def order_lost(self, rank: int, order: WriteOrder, now: float) -> None:
        """An order could not be handed to its rank: it is never started."""
        attempt = self._open.get(order.key)
        if attempt is None or attempt.peer != (order.instance_id, order.incarnation):
            return
        for writer in attempt.missing:
            if writer[0] == rank:
                reason = f"rank {rank} of the context instance is gone"
                self._over(attempt, never(order.key, writer, reason), now)

    def rank_exited(self, rank: int, reason: str, now: float) -> None:
        """Exit report of the parent. Open writes of the rank are over once the fabric has drained: see `tick`. Pages
        that nobody has asked for are gone with it."""
        self._exited.setdefault(rank, (now + self._config.drain_s, reason))
        for attempt in list(self._open.values()):
            if attempt.state is TransmitState.OFFERED and any(one.rank == rank for one in attempt.offer.sources):
                attempt.failure = TransferFailure.WRITE_FAILED
                attempt.reason = f"rank {rank} of the context instance exited: {reason}"
                self._step(attempt, TransmitEvent.REFUSED, now)

    def tick(self, now: float) -> None:
        """Expires offers and settles the writes of exited ranks."""
        for attempt in list(self._open.values()):
            if attempt.state is TransmitState.OFFERED and now >= attempt.deadline:
                attempt.failure = TransferFailure.EXPIRED
                attempt.reason = f"nobody asked for the pages within {self._config.handoff_hold_s:g} s"
                self._step(attempt, TransmitEvent.EXPIRED, now)
        for rank, (drained, reason) in self._exited.items():
            if now < drained:
                continue
            for attempt in list(self._open.values()):
                for writer in attempt.missing:
                    if writer[0] == rank:
                        why = f"rank {rank} of the context instance exited: {reason}"
                        self._over(
                            attempt, TransferNotice(attempt.offer.key, *writer, WriterOutcome.QUIESCED, (), why), now
                        )

    # --- questions

    @property
    def is_idle(self) -> bool:
        """True when no pages are held."""
        return not self._open

    def has_open(self, peer: PeerId) -> bool:
        """True while a write to the peer may be going on."""
        return any(attempt.peer == peer for attempt in self._open.values())

    def views(self, now: float) -> list[SessionView]:
        """Every attempt that holds pages."""
        return [
            SessionView(
                key=key,
                side=InstanceRole.CONTEXT,
                state=attempt.state.name.lower(),
                peer_instance_id="" if attempt.peer is None else attempt.peer[0],
                age=now - attempt.since,
                pages=sum(len(blocks.blocks) for blocks in attempt.offer.sources),
                in_doubt=False,
            )
            for key, attempt in self._open.items()
        ]

    # --- steps

    def _problem(self, peer: PeerId, request: KvRequest, writers: tuple[Writer, ...]) -> str:
        limits = self._peers[peer].limits
        count = sum(attempt.peer == peer for attempt in self._open.values())
        if count >= limits.max_open_requests:
            return f"{count} requests of this peer are open, at most {limits.max_open_requests} may be"
        ids = sum(len(blocks.blocks) for blocks in request.destinations)
        if ids > limits.max_block_ids:
            return f"the request names {ids} blocks, at most {limits.max_block_ids} may be"
        gone = sorted({src for src, _ in writers if src in self._exited})
        return f"ranks {gone} of the context instance are gone" if gone else ""

    def _start(
        self, attempt: Attempt, peer: PeerId, request: KvRequest, writers: tuple[Writer, ...], now: float
    ) -> None:
        attempt.peer, attempt.writers = peer, dict.fromkeys(writers)
        self._step(attempt, TransmitEvent.REQUESTED, now)
        for writer in writers:
            attempt.spans[writer] = begin_transfer(self._tracing, request.trace, request.key, peer, writer)
        for rank, order in write_orders(attempt.offer, peer, request, writers):
            self._emit(ToRank(rank, order))
        if not writers:
            self._step(attempt, TransmitEvent.ALL_OVER, now)

    def _cancel(self, attempt: Attempt, reason: str, now: float) -> None:
        if attempt.failure is TransferFailure.NONE:
            attempt.failure, attempt.reason = TransferFailure.CANCELLED, reason
        self._step(attempt, TransmitEvent.CANCELLED, now)
        for rank in dict.fromkeys(src for src, _ in attempt.missing):
            self._emit(ToRank(rank, CancelWrite(attempt.offer.key)))

    def _over(self, attempt: Attempt, notice: TransferNotice, now: float) -> None:
        writer = (notice.src_rank, notice.dst_rank)
        attempt.writers[writer] = notice
        end_transfer(attempt.spans.pop(writer), notice)
        if attempt.peer is not None:
            self._emit(ToPeer(attempt.peer, notice))
        if not attempt.missing:
            self._step(attempt, TransmitEvent.ALL_OVER, now)

    def _refuse(
        self,
        attempt: Attempt,
        peer: PeerId,
        writers: tuple[Writer, ...],
        reason: str,
        now: float,
        failure: TransferFailure = TransferFailure.WRITE_FAILED,
    ) -> None:
        for notice in self._end_unasked(attempt, peer, writers, reason, now, failure):
            self._emit(ToPeer(peer, notice))

    def _end_unasked(
        self,
        attempt: Attempt,
        peer: PeerId,
        writers: tuple[Writer, ...],
        reason: str,
        now: float,
        failure: TransferFailure,
    ) -> tuple[TransferNotice, ...]:
        """Ends an offer that is not written, on behalf of the peer that made it end."""
        attempt.peer, attempt.failure, attempt.reason = peer, failure, reason
        attempt.writers = {writer: never(attempt.offer.key, writer, reason) for writer in writers}
        self._step(attempt, TransmitEvent.REFUSED, now)
        return attempt.known

    def _answer(
        self, peer: PeerId, key: RequestKey, writers: tuple[Writer, ...], reason: str
    ) -> tuple[TransferNotice, ...]:
        """What is known of an attempt that is not this peer's to start. Makes a tombstone when nothing is known."""
        attempt, finished = self._open.get(key), self._finished.get(key)
        if attempt is not None and attempt.peer == peer:
            return attempt.known
        if finished is not None and finished.peer == peer:
            return finished.notices
        not_held = True
        if attempt is not None or (finished is not None and finished.peer is not None):
            reason = "the pages were offered to another instance"
        elif finished is not None:
            # Pages that died with their rank are a failed write, not a hold that ran out.
            reason, not_held = finished.reason, not finished.lost
        notices = tuple(never(key, writer, reason, not_held=not_held) for writer in writers)
        if attempt is None and finished is None:
            self._remember(key, Finished(peer, notices, reason, offered=False))
        return notices

    def _step(self, attempt: Attempt, event: TransmitEvent, now: float) -> None:
        """The only place where an attempt changes state; leaving through ENDED is the one terminal path."""
        key = attempt.offer.key
        state = TRANSITIONS.get((attempt.state, event))
        if state is None:
            raise TransferStateError(key, f"is {attempt.state.name}: {event.name} can not happen")
        if state is not attempt.state:
            attempt.state, attempt.since = state, now
        if state is not TransmitState.ENDED:
            return
        failure, reason = attempt.result(event)
        del self._open[key]
        lost = failure is TransferFailure.WRITE_FAILED
        self._remember(key, Finished(attempt.peer, attempt.known, attempt.reason or reason, offered=True, lost=lost))
        self._emit(ToScheduler(SendOutcome(key, failure, reason)))

    def _remember(self, key: RequestKey, finished: Finished) -> None:
        self._finished[key] = finished
        self._finished.move_to_end(key)
        while len(self._finished) > self._config.max_finished:
            self._finished.popitem(last=False)
