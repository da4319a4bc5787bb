"""The context side of a hand-off: offers of the scheduler joined with requests of peers.

    offer ─▶ OFFERED ── KvRequest ─▶ WRITING ── every writer over ─▶ ENDED
              ▲ │                      │ │ cancel                     ▲
              │ │ cancel, expiry       │ ▼                            │
              │ └──────────────────────│ CANCELLING ── writers over ──┤
              │                        │                              │
              └── failed, may retry ───┘ ◀── cancel, expiry ──────────┘

Pages are offered whole or chunk by chunk; every chunk is ordered as soon as both it and a KvRequest are there, and each
writer says one last word over all its chunks. A KvRequest is served at most once: its number decides, so neither a late
copy nor an answer to an earlier one can be taken for it. What was said is remembered for a while (`Answers`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.messages import ReceiveKey, ReconcileReply
from kvtransfer.ports import SendOutcome, TransferFailure, TransferNotice, WriterOutcome
from kvtransfer.session.actions import Emit, KillRank, PeerId, ToPeer, ToScheduler
from kvtransfer.session.answers import Answers, Ended
from kvtransfer.session.transmit_attempt import (
    TRANSITIONS,
    Attempt,
    TransmitEvent,
    TransmitPeer,
    TransmitState,
    Writer,
    limit_problem,
    never,
)
from kvtransfer.session.views import transmit_view
from kvtransfer.session.writing import Writing

if TYPE_CHECKING:
    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.messages import KvRequest, SessionView
    from kvtransfer.ports import RequestKey, SendOffer, WriteOrder

log = logging.getLogger(__name__)


class TransmitSessions:
    """All attempts of one context instance. `emit` must not call back."""

    def __init__(self, config: TransferConfig, emit: Emit, tracing: Tracing) -> None:
        self._config, self._emit = config, emit
        self._writing = Writing(emit, tracing)
        self._open: dict[RequestKey, Attempt] = {}
        self._answers = Answers(config.max_finished, self._open)
        self._peers: dict[PeerId, TransmitPeer] = {}
        self._exited: dict[int, tuple[float, str]] = {}

    # --- the scheduler

    def offer(self, offer: SendOffer, now: float) -> None:
        """Holds pages until somebody asks for them, at most `handoff_hold_s` after the last chunk. A chunk of an
        attempt that has ended changes nothing: its outcome has been said. Raises TransferStateError for a key that is
        held already, or a chunk out of order."""
        attempt = self._open.get(offer.key)
        if attempt is None:
            if offer.chunk == 0:
                self._admit(offer, now)
            return
        following = len(attempt.chunks) + attempt.bound
        if not attempt.more or offer.chunk != following or offer.dp_rank != attempt.dp_rank:
            what = f"chunk {offer.chunk} of group {offer.dp_rank} comes after {following} of group {attempt.dp_rank}"
            raise TransferStateError(offer.key, what if offer.chunk else "is offered already")
        attempt.chunks.append(offer)
        attempt.more, attempt.deadline = offer.more, now + self._config.handoff_hold_s
        if attempt.state is TransmitState.WRITING:
            self._writing.order(attempt, offer)
            self._conclude(attempt, now)

    def _admit(self, offer: SendOffer, now: float) -> None:
        refused = self._answers.take_tombstone(offer.key)
        if refused is not None:
            self._answers.end(offer.key, replace(refused, offered=True))
            self._emit(ToScheduler(SendOutcome(offer.key, TransferFailure.CANCELLED, refused.reason)))
            return
        deadline = now + self._config.handoff_hold_s
        self._open[offer.key] = Attempt(offer.key, deadline, now, [offer], offer.more, dp_rank=offer.dp_rank)

    def prepare(self, key: RequestKey, now: float, dp_rank: int = 0) -> None:
        """A peer may ask before the first chunk is there. Raises TransferStateError for a key that is held already."""
        if key in self._open:
            raise TransferStateError(key, "is offered already")
        self._answers.take_tombstone(key)
        self._open[key] = Attempt(key, now + self._config.handoff_hold_s, now, more=True, bound=True, dp_rank=dp_rank)

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
        self._answers.forget(peer)

    def request(self, peer: PeerId, request: KvRequest, now: float) -> None:
        """Starts the writes, or answers for every writer that they never start. A repeat gets what is known so far.
        Raises ProtocolError for destinations that the peer does not have."""
        writers = self._peers[peer].serving(request)
        key, receive, attempt = request.key, request.receive, self._open.get(request.key)
        is_repeat = attempt is not None and attempt.peer == peer and attempt.receive == receive
        if is_repeat or self._answers.is_old(peer, receive):
            self._writing.say(
                peer, self._answers.answer(peer, key, receive, writers, "an old request of a broken stream")
            )
            return
        self._answers.seen(peer, receive)
        if attempt is None or attempt.peer is not None:
            self._writing.say(peer, self._answers.not_held(peer, key, receive, writers, "the pages were never offered"))
        elif problem := self._problem(peer, request, attempt.dp_rank, writers):
            self._refuse(attempt, peer, receive, writers, problem, TransferFailure.WRITE_FAILED, now)
        else:
            self._start(attempt, peer, request, writers, now)

    def cancel(self, peer: PeerId, key: RequestKey, receive: int, now: float) -> None:
        """The peer no longer wants the attempt. Every writer still answers; what is known is said again. One that names
        an earlier KvRequest than the one that is served changes nothing."""
        attempt, writers = self._open.get(key), self._peers[peer].writers
        reason = "cancelled by the generation instance"
        if attempt is not None and attempt.peer == peer and attempt.receive == receive:
            self._cancel(attempt, reason, now)
        elif attempt is not None and attempt.peer is None:
            self._refuse(attempt, peer, receive, writers, reason, TransferFailure.CANCELLED, now)
        else:
            self._writing.say(peer, self._answers.answer(peer, key, receive, writers, reason))

    def reconcile(self, peer: PeerId, receives: Iterable[ReceiveKey], now: float) -> None:
        """Says of each KvRequest what is over and what is being written. One that was never seen will never be started;
        its pages stay offered for the next one. Raises ProtocolError for more than the peer may have open."""
        receives = tuple(receives)
        limit = self._peers[peer].limits.max_open_requests
        if len(receives) > limit:
            raise ProtocolError(f"Reconcile names {len(receives)} attempts, at most {limit} may be open")
        in_flight: list[ReceiveKey] = []
        notices: list[TransferNotice] = []
        for one in receives:
            attempt = self._open.get(one.key)
            if attempt is not None and attempt.peer == peer and attempt.receive == one.receive and attempt.missing:
                in_flight.append(one)
            reason = "the request was lost with the old stream"
            notices += self._answers.answer(peer, one.key, one.receive, self._peers[peer].writers, reason)
        self._emit(ToPeer(peer, ReconcileReply(tuple(in_flight), tuple(notices))))

    def fence(self, peer: PeerId, receives: Iterable[ReceiveKey]) -> tuple[TransferNotice, ...]:
        """The peer suspects the writers of these KvRequests: ranks that still write are killed, and their exit settles
        it. What is over is returned again."""
        notices: list[TransferNotice] = []
        for one in receives:
            attempt = self._open.get(one.key)
            if attempt is not None and attempt.peer == peer and attempt.receive == one.receive:
                self._kill(attempt, f"fenced by {peer[0]}: request {one.key} is not over")
            reason = "never seen by this instance"
            notices += self._answers.answer(peer, one.key, one.receive, self._writers(peer), reason)
        return tuple(notices)

    def exited_ranks(self) -> tuple[int, ...]:
        """Ranks whose parent has reported their exit."""
        return tuple(sorted(self._exited))

    def goodbye(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer stops: what it has asked for is not wanted any more."""
        for attempt in list(self._open.values()):
            if attempt.peer == peer and attempt.state is not TransmitState.CANCELLING:
                self._cancel(attempt, reason, now)

    # --- ranks

    def notice(self, rank: int, notice: TransferNotice, now: float) -> None:
        """One writer of a rank is over with one order. Late and repeated notices change nothing."""
        attempt = self._open.get(notice.key)
        progress = None if attempt is None else attempt.writers.get((rank, notice.dst_rank))
        if attempt is None or progress is None or notice.src_rank != rank or notice.receive != attempt.receive:
            log.debug("notice of rank %d for attempt %s is not waited for", rank, notice.key)
            return
        if progress.final is not None or progress.open == 0:
            log.debug("notice of rank %d for attempt %s comes again", rank, notice.key)
            return
        progress.open -= 1
        progress.parts.append(notice)
        self._conclude(attempt, now)

    def order_lost(self, rank: int, order: WriteOrder, now: float) -> None:
        """An order could not be handed to its rank: it is never started."""
        reason = f"rank {rank} of the context instance is gone"
        for dst in {blocks.rank for blocks in order.destinations}:
            self.notice(rank, never(order.key, (rank, dst), reason, receive=order.receive), now)

    def rank_exited(self, rank: int, reason: str, now: float) -> None:
        """Exit report of the parent. Open writes of the rank are over once the fabric has drained: see `tick`. Pages
        that nobody has asked for are gone with it."""
        self._exited.setdefault(rank, (now + self._config.drain_s, reason))
        for attempt in list(self._open.values()):
            if attempt.state is TransmitState.OFFERED and attempt.has_rank(rank):
                attempt.failure = TransferFailure.WRITE_FAILED
                attempt.reason = f"rank {rank} of the context instance exited: {reason}"
                self._step(attempt, TransmitEvent.REFUSED, now)

    def tick(self, now: float) -> None:
        """Expires offers, kills ranks that do not finish what was cancelled, settles the writes of exited ones."""
        for attempt in list(self._open.values()):
            if attempt.state is TransmitState.OFFERED and not attempt.more and now >= attempt.deadline:
                attempt.failure = TransferFailure.EXPIRED
                attempt.reason = f"nobody asked for the pages within {self._config.handoff_hold_s:g} s"
                self._step(attempt, TransmitEvent.EXPIRED, now)
            elif attempt.is_stuck(now - self._config.in_doubt_s) and self._config.fence_writer:
                attempt.fenced = True
                self._kill(attempt, f"request {attempt.key} was cancelled and is not over")
        for rank, (drained, reason) in self._exited.items():
            if now < drained:
                continue
            why = f"rank {rank} of the context instance exited: {reason}"
            for attempt in list(self._open.values()):
                for writer in attempt.missing:
                    if writer[0] == rank:
                        dead = TransferNotice(attempt.key, *writer, WriterOutcome.QUIESCED, (), why)
                        self._writing.over(attempt, writer, [*attempt.writers[writer].parts, dead])
                self._finish(attempt, now)

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
        return [transmit_view(attempt, now) for attempt in self._open.values()]

    # --- steps

    def _kill(self, attempt: Attempt, reason: str) -> None:
        for rank in dict.fromkeys(src for src, _ in attempt.missing):
            if rank not in self._exited:
                self._emit(KillRank(rank, reason))

    def _writers(self, peer: PeerId) -> tuple[Writer, ...]:
        """All that may write to the peer; none to one that has been forgotten."""
        return self._peers[peer].writers if peer in self._peers else ()

    def _problem(self, peer: PeerId, request: KvRequest, dp_rank: int, writers: tuple[Writer, ...]) -> str:
        if request.src_dp != dp_rank:
            return f"attention-dp group {dp_rank} holds the pages, group {request.src_dp} is asked"
        count = sum(attempt.peer == peer for attempt in self._open.values())
        gone = sorted({src for src, _ in writers if src in self._exited})
        if gone:
            return f"ranks {gone} of the context instance are gone"
        return limit_problem(self._peers[peer].limits, request, count)

    def _start(
        self, attempt: Attempt, peer: PeerId, request: KvRequest, writers: tuple[Writer, ...], now: float
    ) -> None:
        self._writing.begin(attempt, peer, request, writers)
        self._step(attempt, TransmitEvent.REQUESTED, now)
        self._conclude(attempt, now)

    def _cancel(self, attempt: Attempt, reason: str, now: float) -> None:
        if attempt.failure is TransferFailure.NONE:
            attempt.failure, attempt.reason = TransferFailure.CANCELLED, reason
        attempt.cut_short |= attempt.more
        self._step(attempt, TransmitEvent.CANCELLED, now)
        if attempt.state is not TransmitState.ENDED:
            self._writing.cancel(attempt)
            self._conclude(attempt, now)

    def _conclude(self, attempt: Attempt, now: float) -> None:
        self._writing.conclude(attempt)
        self._finish(attempt, now)

    def _finish(self, attempt: Attempt, now: float) -> None:
        """Ends the attempt, or offers it again, when every writer is over."""
        waits = attempt.state is TransmitState.WRITING and attempt.more
        if attempt.asked is None or attempt.missing or waits:
            return
        failed = any(one.outcome is not WriterOutcome.DELIVERED for one in attempt.known)
        kept = failed and attempt.asked.may_retry and attempt.failure is TransferFailure.NONE and not self._exited
        self._step(attempt, TransmitEvent.KEPT if kept else TransmitEvent.ALL_OVER, now)
        if kept:
            attempt.deadline = now + self._config.handoff_hold_s

    def _refuse(
        self,
        attempt: Attempt,
        peer: PeerId,
        receive: int,
        writers: tuple[Writer, ...],
        reason: str,
        failure: TransferFailure,
        now: float,
    ) -> None:
        """Ends an offer that is not written, on behalf of the peer that made it end."""
        notices = tuple(never(attempt.key, writer, reason, receive=receive) for writer in writers)
        self._answers.record(peer, attempt.key, receive, notices)
        self._writing.say(peer, notices)
        attempt.peer, attempt.failure, attempt.reason = peer, failure, reason
        self._step(attempt, TransmitEvent.REFUSED, now)

    def _step(self, attempt: Attempt, event: TransmitEvent, now: float) -> None:
        """The only place where an attempt changes state; leaving through ENDED is the one terminal path."""
        key = attempt.key
        state = TRANSITIONS.get((attempt.state, event))
        if state is None:
            raise TransferStateError(key, f"is {attempt.state.name}: {event.name} can not happen")
        if state is not attempt.state:
            attempt.state, attempt.since = state, now
        if attempt.asked is not None and event in (TransmitEvent.ALL_OVER, TransmitEvent.KEPT) and attempt.peer:
            self._answers.record(attempt.peer, key, attempt.receive, attempt.known)
        if event is TransmitEvent.KEPT:
            attempt.peer, attempt.asked = None, None
            attempt.writers.clear()
        if state is not TransmitState.ENDED:
            return
        failure, reason = attempt.result(event)
        del self._open[key]
        lost = failure is TransferFailure.WRITE_FAILED
        self._answers.end(key, Ended(attempt.peer, attempt.reason or reason, offered=True, lost=lost))
        self._emit(ToScheduler(SendOutcome(key, failure, reason)))
