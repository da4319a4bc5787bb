"""The generation side of a hand-off: pages are exposed, asked for, and given back when no write can touch them.

    QUEUED ─ stream ready ─▶ WAITING ── manifest complete, or every writer over ──────────────▶ ENDED
       │                      │  ▲ │ deadline, cancel                                            ▲
       │         stream broke ▼  │ └─▶ FAILING ── every writer over, or proven dead ─────────────┤
       │                     DOUBT        ▲ ▼ stream broke, reconciled                           │
       │                      └────▶ FAILING_DOUBT ── every writer over, or proven dead ─────────┤
       └── deadline, cancel (nobody knows the pages) ────────────────────────────────────────────┘

Pages are in the ledger before the KvRequest can escape. A broken stream settles nothing and fails nothing: Reconcile,
an exit report or the deadline does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID
from kvtransfer.errors import LedgerError, ManifestError, PlanError, ProtocolError, TransferStateError
from kvtransfer.manifest import Manifest
from kvtransfer.messages import Cancel, KvRequest, Reconcile, SessionView
from kvtransfer.peer_plan import expected_need
from kvtransfer.ports import ReceiveOutcome, TransferFailure, WriterOutcome
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToScheduler
from kvtransfer.session.receive_attempt import (
    FAILED,
    IN_DOUBT,
    PUBLISHED,
    TRANSITIONS,
    Attempt,
    ReceiveEvent,
    ReceiveState,
)
from kvtransfer.tracing import begin_receive, end_receive

if TYPE_CHECKING:
    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.ledger import Ledger
    from kvtransfer.messages import ReconcileReply, TransferLimits
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import ReceiveRequest, RequestKey, TransferNotice

log = logging.getLogger(__name__)

# A request for a known peer whose stream is being opened waits at most this long: long enough for a reconnect, short
# enough for the request to be served elsewhere.
CONNECT_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class ReceivePeer:
    """What is agreed with a context instance: who writes what, and how much may be asked for."""

    plans: tuple[PeerPlan, ...]
    limits: TransferLimits
    reconciles: bool


class ReceiveSessions:
    """All attempts of one generation instance. `emit` must not call back."""

    def __init__(self, config: TransferConfig, ledger: Ledger, emit: Emit, tracing: Tracing) -> None:
        self._config, self._ledger, self._emit, self._tracing = config, ledger, emit, tracing
        self._open: dict[RequestKey, Attempt] = {}
        # None: known, but the stream is not ready.
        self._peers: dict[PeerId, ReceivePeer | None] = {}
        self._refused: dict[PeerId, str] = {}

    # --- the scheduler

    def receive(self, request: ReceiveRequest, now: float) -> None:
        """Reserves the pages and asks for the cache as soon as the stream is ready. What can not work gets a settled
        outcome at once. Raises TransferStateError for a key that is being received already."""
        key, peer = request.key, (request.holder.instance_id, request.holder.incarnation)
        if key in self._open:
            raise TransferStateError(key, "is being received already")
        if not MIN_GLOBAL_ID <= key.request_id < MAX_GLOBAL_ID:
            self._decline(key, TransferFailure.WRITE_FAILED, f"request id {key.request_id} is local: it never travels")
            return
        if peer not in self._peers:
            reason = self._refused.get(peer, f"no stream to instance {peer[0]}, incarnation {peer[1].hex()}")
            self._decline(key, TransferFailure.PEER_UNKNOWN, reason)
            return
        try:
            self._ledger.reserve(key, request.destinations, peer[1], now)
        except LedgerError as error:
            self._decline(key, TransferFailure.WRITE_FAILED, str(error))
            return
        patience = min(CONNECT_PATIENCE_S, self._config.timeout_s)
        attempt = self._open[key] = Attempt(request, peer, now + patience, now, now)
        terms = self._peers[peer]
        if terms is not None:
            self._publish(attempt, terms, now)

    def withdraw(self, key: RequestKey, now: float) -> None:
        """The scheduler no longer wants the attempt. Nothing happens when it is over: its outcome is on its way."""
        attempt = self._open.get(key)
        if attempt is not None and attempt.state not in FAILED:
            attempt.failure, attempt.reason = TransferFailure.CANCELLED, "cancelled"
            self._step(attempt, ReceiveEvent.CANCELLED, now)

    # --- streams

    def peer_known(self, peer: PeerId) -> None:
        """A stream to the peer is being opened: requests for it may wait."""
        self._peers.setdefault(peer, None)
        self._refused.pop(peer, None)

    def peer_refused(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer is announced but incompatible: as `peer_gone`, and later requests are told why."""
        self.peer_gone(peer, reason, now)
        self._refused[peer] = reason

    def peer_gone(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer takes no new requests. Requests that wait for its stream end; those that it knows go on."""
        self._peers.pop(peer, None)
        self._refused.pop(peer, None)
        for attempt in self._of(peer):
            if attempt.state is ReceiveState.QUEUED:
                self._fail(attempt, TransferFailure.PEER_UNKNOWN, reason, now)

    def peer_superseded(self, peer: PeerId, reason: str, now: float) -> None:
        """Another incarnation took the peer's place: its requests fail. Their pages stay exposed until there is proof
        that it exited."""
        self._peers.pop(peer, None)
        self._refused.pop(peer, None)
        for attempt in self._of(peer):
            if attempt.state not in FAILED:
                self._fail(attempt, TransferFailure.PEER_LOST, reason, now)

    def stream_ready(self, peer: PeerId, terms: ReceivePeer, now: float) -> None:
        """A stream may be used. What is in doubt is asked about before anything new is said."""
        if peer in self._peers:
            self._peers[peer] = terms
        doubtful = tuple(attempt.request.key for attempt in self._of(peer) if attempt.state in IN_DOUBT)
        if doubtful and terms.reconciles:
            self._emit(ToPeer(peer, Reconcile(doubtful)))
        for attempt in self._of(peer):
            if attempt.state is ReceiveState.QUEUED:
                self._publish(attempt, terms, now)

    def stream_broke(self, peer: PeerId, now: float) -> None:
        """The stream has ended, for whatever reason: that says nothing about the writers."""
        if self._peers.get(peer) is not None:
            self._peers[peer] = None
        for attempt in self._of(peer):
            if attempt.state in PUBLISHED and attempt.state not in IN_DOUBT:
                self._ledger.doubt(attempt.request.key, now)
                self._step(attempt, ReceiveEvent.STREAM_BROKE, now)

    def reconciled(self, peer: PeerId, reply: ReconcileReply, now: float) -> None:
        """Answer to Reconcile. Raises ProtocolError when it leaves an attempt out."""
        for notice in reply.notices:
            self.notice(peer, notice, now)
        for key in reply.in_flight:
            attempt = self._open.get(key)
            if attempt is not None and attempt.peer == peer and attempt.state in IN_DOUBT:
                self._ledger.reconcile(key, now)
                self._step(attempt, ReceiveEvent.RECONCILED, now)
        left = [str(attempt.request.key) for attempt in self._of(peer) if attempt.state in IN_DOUBT]
        if left:
            raise ProtocolError(f"ReconcileReply of {peer[0]} says nothing of attempts {', '.join(left)}")

    # --- writers

    def notice(self, peer: PeerId, notice: TransferNotice, now: float) -> None:
        """One writer is over. Notices of other attempts, other peers and repeats change nothing."""
        attempt = self._open.get(notice.key)
        writer = (notice.src_rank, notice.dst_rank)
        if attempt is None or attempt.peer != peer or writer not in self._ledger.waiting_for(notice.key):
            log.debug("notice of %s for attempt %s is not waited for", peer[0], notice.key)
            return
        attempt.notices.append(notice)
        problem = self._take(attempt, notice)
        last = self._ledger.settle(notice.key, writer, notice.outcome, now)
        if problem and attempt.failure is TransferFailure.NONE:
            failure = TransferFailure.NOT_HELD if notice.not_held else TransferFailure.WRITE_FAILED
            if not last:
                self._fail(attempt, failure, problem, now)
            attempt.failure, attempt.reason = failure, problem
        if last:
            complete = attempt.manifest.complete and attempt.failure is TransferFailure.NONE
            self._step(attempt, ReceiveEvent.COMPLETE if complete else ReceiveEvent.ALL_OVER, now)

    def peer_exited(self, instance_id: str, incarnations: Iterable[bytes], now: float) -> None:
        """Proof that every process of these incarnations has exited. Their pages are settled after `drain_s`."""
        exited = set(incarnations)
        for attempt in list(self._open.values()):
            if attempt.peer[0] != instance_id or attempt.peer[1] not in exited or attempt.dead_at is not None:
                continue
            attempt.dead_at = now + self._config.drain_s
            if attempt.state not in FAILED:
                self._fail(attempt, TransferFailure.PEER_LOST, f"instance {instance_id} has exited", now)

    def rank_exited(self, rank: int, reason: str, now: float) -> None:
        """A rank of this instance is gone, and with it the destination of every attempt that names it."""
        for attempt in list(self._open.values()):
            if attempt.state not in FAILED and any(blocks.rank == rank for blocks in attempt.request.destinations):
                why = f"rank {rank} of the generation instance exited: {reason}"
                self._fail(attempt, TransferFailure.WRITE_FAILED, why, now)

    def tick(self, now: float) -> None:
        """Deadlines fail attempts; they never settle pages. Drained proofs do."""
        for attempt in list(self._open.values()):
            if attempt.dead_at is not None and now >= attempt.dead_at:
                self._ledger.prove_dead(attempt.request.key, attempt.peer[1], now)
                self._step(attempt, ReceiveEvent.WRITERS_DEAD, now)
            elif attempt.state not in FAILED and now >= attempt.deadline:
                waited = f"{now - attempt.started:.1f} s"
                if attempt.state is ReceiveState.QUEUED:
                    reason = f"no stream to instance {attempt.peer[0]} for {waited}"
                    self._fail(attempt, TransferFailure.PEER_UNKNOWN, reason, now)
                else:
                    self._fail(attempt, TransferFailure.TIMED_OUT, f"the cache is not complete after {waited}", now)

    # --- questions

    @property
    def is_idle(self) -> bool:
        """True when no pages are reserved or exposed."""
        return not self._open

    def has_open(self, peer: PeerId) -> bool:
        """True while a writer of the peer may touch pages, or a request waits for its stream."""
        return bool(self._of(peer))

    def views(self, now: float) -> list[SessionView]:
        """Every attempt that holds pages."""
        return [
            SessionView(
                key=key,
                side=InstanceRole.GENERATION,
                state=attempt.state.name.lower(),
                peer_instance_id=attempt.peer[0],
                age=now - attempt.since,
                pages=self._ledger.pages(key),
                in_doubt=attempt.state in IN_DOUBT,
            )
            for key, attempt in self._open.items()
        ]

    # --- steps

    def _of(self, peer: PeerId) -> list[Attempt]:
        return [attempt for attempt in self._open.values() if attempt.peer == peer]

    def _publish(self, attempt: Attempt, terms: ReceivePeer, now: float) -> None:
        request, ranks = attempt.request, {blocks.rank for blocks in attempt.request.destinations}
        plans = [plan for plan in terms.plans if plan.dst_rank in ranks]
        try:
            self._check(attempt, terms, plans)
        except PlanError as error:
            self._fail(attempt, TransferFailure.WRITE_FAILED, str(error), now)
            return
        need = expected_need(plans, request.tokens)
        attempt.manifest, attempt.started = Manifest(need), now
        attempt.deadline = now + self._config.timeout_s
        attempt.span = begin_receive(self._tracing, request)
        self._ledger.expose(request.key, need.writers, now)
        self._step(attempt, ReceiveEvent.PUBLISHED, now)
        trace = attempt.span.context or request.trace
        # Also for an empty need: it tells the context side that its pages are not wanted any more.
        self._emit(ToPeer(attempt.peer, KvRequest(request.key, request.tokens, request.destinations, trace)))
        if not need.writers:
            self._step(attempt, ReceiveEvent.COMPLETE, now)

    def _check(self, attempt: Attempt, terms: ReceivePeer, plans: list[PeerPlan]) -> None:
        request, limits = attempt.request, terms.limits
        missing = {blocks.rank for blocks in request.destinations} - {plan.dst_rank for plan in plans}
        if missing:
            raise PlanError(f"nobody writes to ranks {sorted(missing)}")
        for plan in plans:
            lists = {one.layer_group: one.blocks for one in request.destinations if one.rank == plan.dst_rank}
            plan.check_destination(lists, request.tokens)
        ids = sum(len(one.blocks) for one in request.destinations)
        if ids > limits.max_block_ids:
            raise PlanError(f"{ids} blocks, instance {attempt.peer[0]} takes at most {limits.max_block_ids} at once")
        count = sum(other.state in PUBLISHED for other in self._of(attempt.peer))
        if count >= limits.max_open_requests:
            raise PlanError(f"{count} requests are open, instance {attempt.peer[0]} takes {limits.max_open_requests}")

    def _take(self, attempt: Attempt, notice: TransferNotice) -> str:
        """Adds what a writer delivered to the manifest. Says what is wrong with it, empty when nothing is."""
        if notice.outcome is not WriterOutcome.DELIVERED:
            return notice.reason or f"rank {notice.src_rank} did not write everything"
        try:
            attempt.manifest.add(notice.src_rank, notice.dst_rank, notice.extents)
        except ManifestError as error:
            return str(error)
        return ""

    def _fail(self, attempt: Attempt, failure: TransferFailure, reason: str, now: float) -> None:
        attempt.failure, attempt.reason = failure, reason
        self._step(attempt, ReceiveEvent.FAILED, now)
        if attempt.state in FAILED:
            self._emit(ToScheduler(ReceiveOutcome(attempt.request.key, False, failure, reason)))

    def _step(self, attempt: Attempt, event: ReceiveEvent, now: float) -> None:
        """The only place where an attempt changes state; leaving through ENDED is the one terminal path."""
        key, before = attempt.request.key, attempt.state
        state = TRANSITIONS.get((before, event))
        if state is None:
            raise TransferStateError(key, f"is {before.name}: {event.name} can not happen")
        attempt.state, attempt.since = state, now
        if state is ReceiveState.FAILING:
            # Said again after a reconnect: the first one may have been lost.
            self._emit(ToPeer(attempt.peer, Cancel(key)))
        if state is ReceiveState.ENDED:
            self._end(attempt, event, now)

    def _end(self, attempt: Attempt, event: ReceiveEvent, now: float) -> None:
        key = attempt.request.key
        if event is ReceiveEvent.COMPLETE:
            outcome = ReceiveOutcome(key, True, stats=attempt.stats(now))
        else:
            if attempt.failure is TransferFailure.NONE:
                attempt.failure = TransferFailure.WRITE_FAILED
                attempt.reason = f"every writer is over, {attempt.manifest.missing} (token, layer)s are missing"
            outcome = ReceiveOutcome(key, True, attempt.failure, attempt.reason, attempt.stats(now))
        self._ledger.release(key)
        del self._open[key]
        end_receive(attempt.span, outcome)
        self._emit(ToScheduler(outcome))

    def _decline(self, key: RequestKey, failure: TransferFailure, reason: str) -> None:
        self._emit(ToScheduler(ReceiveOutcome(key, True, failure, reason)))
