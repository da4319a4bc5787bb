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
from typing import TYPE_CHECKING

from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID
from kvtransfer.errors import LedgerError, PlanError, ProtocolError, TransferStateError
from kvtransfer.manifest import Manifest
from kvtransfer.messages import Cancel, KvRequest, Reconcile
from kvtransfer.peer_plan import expected_need
from kvtransfer.ports import ReceiveOutcome, TransferFailure
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToScheduler
from kvtransfer.session.holders import Holders, ReceivePeer
from kvtransfer.session.in_doubt import InDoubt
from kvtransfer.session.receive_attempt import (
    FAILED,
    IN_DOUBT,
    PUBLISHED,
    TRANSITIONS,
    Attempt,
    ReceiveEvent,
    ReceiveState,
)
from kvtransfer.session.receive_checks import check_request, take_notice
from kvtransfer.session.views import receive_view
from kvtransfer.tracing import begin_receive, end_receive

if TYPE_CHECKING:
    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.ledger import Ledger
    from kvtransfer.messages import ReconcileReply, SessionView
    from kvtransfer.ports import ReceiveRequest, RequestKey, TransferNotice

log = logging.getLogger(__name__)

# A request for a known peer whose stream is being opened waits at most this long: long enough for a reconnect, short
# enough for the request to be served elsewhere.
CONNECT_PATIENCE_S = 5.0
# States in which the holder has not been told to give its pages up.
_KEPT_IN = (ReceiveState.WAITING, ReceiveState.DOUBT)


class ReceiveSessions:
    """All attempts of one generation instance. `emit` must not call back."""

    def __init__(self, config: TransferConfig, ledger: Ledger, emit: Emit, tracing: Tracing) -> None:
        self._config, self._ledger, self._emit, self._tracing = config, ledger, emit, tracing
        self._open: dict[RequestKey, Attempt] = {}
        self._holders = Holders(config.max_finished)
        self._in_doubt = InDoubt(config, ledger, emit)
        self._gone: set[int] = set()
        self._receives = 0

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
        lost = sorted({blocks.rank for blocks in request.destinations} & self._gone)
        if lost:
            self._decline(key, TransferFailure.WRITE_FAILED, f"ranks {lost} of the generation instance have exited")
            return
        if problem := self._holders.problem(peer):
            self._decline(key, TransferFailure.PEER_UNKNOWN, problem)
            return
        try:
            self._ledger.reserve(key, request.destinations, peer[1], now)
        except LedgerError as error:
            self._decline(key, TransferFailure.WRITE_FAILED, str(error))
            return
        self._holders.take_kept(key)
        self._holders.forgive(key)
        self._holders.use(peer, now)
        limit = now + (request.timeout_s or self._config.timeout_s)
        attempt = self._open[key] = Attempt(request, peer, min(now + CONNECT_PATIENCE_S, limit), limit, now, now)
        terms = self._holders.terms(peer)
        if terms is not None:
            self._publish(attempt, terms, now)

    def withdraw(self, key: RequestKey, now: float) -> None:
        """The scheduler no longer wants the attempt, or will not ask for it once more. Otherwise nothing happens when
        it is over: its outcome is on its way."""
        attempt = self._open.get(key)
        if attempt is None:
            self._give_back(key)
        elif attempt.state not in FAILED:
            attempt.failure, attempt.reason = TransferFailure.CANCELLED, "cancelled"
            self._step(attempt, ReceiveEvent.CANCELLED, now)

    # --- streams

    def peer_known(self, peer: PeerId) -> None:
        """A stream to the peer is being opened: requests for it may wait."""
        self._holders.announce(peer)

    def peer_refused(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer is announced but incompatible: as `peer_gone`, and later requests are told why."""
        self.peer_gone(peer, reason, now)
        self._holders.refuse(peer, reason)

    def peer_gone(self, peer: PeerId, reason: str, now: float) -> None:
        """The peer takes no new requests. Requests that wait for its stream end; those that it knows go on."""
        self._holders.drop(peer)
        for attempt in self._of(peer):
            if attempt.state is ReceiveState.QUEUED:
                self._fail(attempt, TransferFailure.PEER_UNKNOWN, reason, now)

    def peer_superseded(self, peer: PeerId, reason: str, now: float) -> None:
        """Another incarnation took the peer's place: its requests fail. Their pages stay exposed until there is proof
        that it exited."""
        self._holders.drop(peer)
        for attempt in self._of(peer):
            if attempt.state not in FAILED:
                self._fail(attempt, TransferFailure.PEER_LOST, reason, now)

    def stream_ready(self, peer: PeerId, terms: ReceivePeer, now: float) -> None:
        """A stream may be used. What is in doubt is asked about before anything new is said."""
        self._holders.ready(peer, terms)
        for key, receive in self._holders.take_owed(peer):
            self._emit(ToPeer(peer, Cancel(key, receive)))
        doubtful = tuple(attempt.name for attempt in self._of(peer) if attempt.state in IN_DOUBT)
        if doubtful and terms.reconciles:
            self._emit(ToPeer(peer, Reconcile(doubtful)))
        for attempt in self._of(peer):
            if attempt.state is ReceiveState.QUEUED:
                self._publish(attempt, terms, now)

    def stream_broke(self, peer: PeerId, now: float) -> None:
        """The stream has ended, for whatever reason: that says nothing about the writers."""
        self._holders.ready(peer, None)
        for attempt in self._of(peer):
            if attempt.state in PUBLISHED and attempt.state not in IN_DOUBT:
                self._ledger.doubt(attempt.key, now)
                self._step(attempt, ReceiveEvent.STREAM_BROKE, now)

    def reconciled(self, peer: PeerId, reply: ReconcileReply, now: float) -> None:
        """Answer to Reconcile. Raises ProtocolError when it leaves an attempt out."""
        for notice in reply.notices:
            self.notice(peer, notice, now)
        for name in reply.in_flight:
            attempt = self._open.get(name.key)
            if attempt is not None and attempt.peer == peer and attempt.name == name and attempt.state in IN_DOUBT:
                self._ledger.reconcile(name.key, now)
                self._step(attempt, ReceiveEvent.RECONCILED, now)
        left = [str(attempt.key) for attempt in self._of(peer) if attempt.state in IN_DOUBT]
        if left:
            raise ProtocolError(f"ReconcileReply of {peer[0]} says nothing of attempts {', '.join(left)}")

    # --- writers

    def notice(self, peer: PeerId, notice: TransferNotice, now: float) -> None:
        """One writer is over. Notices of other receives, other peers and repeats change nothing."""
        attempt = self._open.get(notice.key)
        writer = (notice.src_rank, notice.dst_rank)
        mine = attempt is not None and (attempt.peer, attempt.receive) == (peer, notice.receive)
        if attempt is None or not mine or writer not in self._ledger.waiting_for(notice.key):
            log.debug("notice of %s for attempt %s is not waited for", peer[0], notice.key)
            return
        attempt.notices.append(notice)
        problem = take_notice(attempt.manifest, notice)
        last = self._ledger.settle(notice.key, writer, notice.outcome, now)
        if problem and attempt.failure is TransferFailure.NONE:
            failure = TransferFailure.NOT_HELD if notice.not_held else TransferFailure.WRITE_FAILED
            # One that may be repeated waits for the other writers instead: a cancel would give the pages up over there.
            if not last and not attempt.request.may_retry:
                self._fail(attempt, failure, problem, now)
            attempt.failure, attempt.reason = failure, problem
        if last:
            complete = attempt.manifest.complete and attempt.failure is TransferFailure.NONE
            self._step(attempt, ReceiveEvent.COMPLETE if complete else ReceiveEvent.ALL_OVER, now)

    def peer_exited(self, instance_id: str, incarnations: Iterable[bytes], now: float) -> None:
        """Proof that every process of these incarnations has exited. Their pages are settled after `drain_s`."""
        exited = set(incarnations)
        for attempt in list(self._open.values()):
            if attempt.peer[0] == instance_id and attempt.peer[1] in exited:
                self._writers_exited(attempt, None, f"instance {instance_id} has exited", now)

    def peer_ranks_exited(self, peer: PeerId, ranks: Iterable[int], reason: str, now: float) -> None:
        """Proof that these ranks of the peer have exited: what waits for them is settled after `drain_s`."""
        gone = frozenset(ranks)
        for attempt in self._of(peer):
            if attempt.state in PUBLISHED and any(src in gone for src, _ in self._ledger.waiting_for(attempt.key)):
                why = f"ranks {sorted(gone)} of instance {peer[0]} have exited: {reason}"
                self._writers_exited(attempt, gone, why, now)

    def _writers_exited(self, attempt: Attempt, ranks: frozenset[int] | None, reason: str, now: float) -> None:
        if self._in_doubt.writers_exited(attempt, ranks, now) and attempt.state not in FAILED:
            self._fail(attempt, TransferFailure.PEER_LOST, reason, now)

    def rank_exited(self, rank: int, reason: str, now: float) -> None:
        """A rank of this instance is gone, and with it the destination of every attempt that names it."""
        self._gone.add(rank)
        for attempt in list(self._open.values()):
            if attempt.state not in FAILED and any(blocks.rank == rank for blocks in attempt.request.destinations):
                why = f"rank {rank} of the generation instance exited: {reason}"
                self._fail(attempt, TransferFailure.WRITE_FAILED, why, now)

    def tick(self, now: float) -> None:
        """Deadlines fail attempts; they never settle pages. Drained proofs do."""
        for attempt in list(self._open.values()):
            if self._in_doubt.settled_by_death(attempt, now):
                self._step(attempt, ReceiveEvent.WRITERS_DEAD, now)
            elif attempt.state not in FAILED and now >= attempt.deadline:
                waited = f"{now - attempt.started:.1f} s"
                if attempt.state is ReceiveState.QUEUED:
                    reason = f"no stream to instance {attempt.peer[0]} for {waited}"
                    self._fail(attempt, TransferFailure.PEER_UNKNOWN, reason, now)
                else:
                    self._fail(attempt, TransferFailure.TIMED_OUT, f"the cache is not complete after {waited}", now)
        self._in_doubt.tick(self._open.values(), now)

    # --- questions

    @property
    def leaked_bytes(self) -> int:
        """Bytes of pages that were given up: their writers neither answer nor are proven dead."""
        return self._in_doubt.leaked_bytes

    @property
    def is_idle(self) -> bool:
        """True when no pages are reserved or exposed."""
        return not self._open

    def last_used(self, peer: PeerId) -> float:
        """When the peer was asked last; minus infinity for never."""
        return self._holders.last_used(peer)

    def has_open(self, peer: PeerId) -> bool:
        """True while a writer of the peer may touch pages, or a request waits for its stream."""
        return bool(self._of(peer))

    def views(self, now: float) -> list[SessionView]:
        """Every attempt that holds pages."""
        return [receive_view(attempt, self._ledger.pages(key), now) for key, attempt in self._open.items()]

    # --- steps

    def _of(self, peer: PeerId) -> list[Attempt]:
        return [attempt for attempt in self._open.values() if attempt.peer == peer]

    def _publish(self, attempt: Attempt, terms: ReceivePeer, now: float) -> None:
        request, src_dp = attempt.request, attempt.request.holder.dp_rank
        plans = [plan for plan in terms.plans if plan.src_dp == src_dp and plan.dst_dp == request.dp_rank]
        try:
            count = sum(other.state in PUBLISHED for other in self._of(attempt.peer))
            check_request(request, terms.limits, plans, count)
        except PlanError as error:
            self._fail(attempt, TransferFailure.WRITE_FAILED, str(error), now)
            return
        begins = {(one.rank, one.layer_group): one.begin for one in request.destinations}
        need = expected_need(plans, request.tokens, begins, src_dp=src_dp, dst_dp=request.dp_rank)
        attempt.manifest, attempt.started = Manifest(need), now
        attempt.deadline = attempt.limit
        attempt.span = begin_receive(self._tracing, request)
        self._receives += 1
        attempt.receive = self._receives
        self._ledger.expose(request.key, need.writers, now)
        self._step(attempt, ReceiveEvent.PUBLISHED, now)
        trace = attempt.span.context or request.trace
        # Also for an empty need: it tells the context side that its pages are not wanted any more.
        ask = KvRequest(
            request.key, request.tokens, request.destinations, trace, attempt.receive, request.may_retry, src_dp
        )
        self._emit(ToPeer(attempt.peer, ask))
        if not need.writers:
            self._step(attempt, ReceiveEvent.COMPLETE, now)

    def _fail(self, attempt: Attempt, failure: TransferFailure, reason: str, now: float) -> None:
        attempt.failure, attempt.reason = failure, reason
        self._step(attempt, ReceiveEvent.FAILED, now)
        if attempt.state in FAILED:
            self._emit(ToScheduler(ReceiveOutcome(attempt.key, False, failure, reason)))

    def _step(self, attempt: Attempt, event: ReceiveEvent, now: float) -> None:
        """The only place where an attempt changes state; leaving through ENDED is the one terminal path."""
        key, before = attempt.key, attempt.state
        state = TRANSITIONS.get((before, event))
        if state is None:
            raise TransferStateError(key, f"is {before.name}: {event.name} can not happen")
        attempt.state, attempt.since = state, now
        if state is ReceiveState.FAILING:
            # Said again after a reconnect: the first one may have been lost.
            self._emit(ToPeer(attempt.peer, Cancel(key, attempt.receive)))
        if state is ReceiveState.ENDED:
            self._end(attempt, event, before, now)

    def _end(self, attempt: Attempt, event: ReceiveEvent, before: ReceiveState, now: float) -> None:
        key = attempt.key
        if event is ReceiveEvent.COMPLETE:
            outcome = ReceiveOutcome(key, True, stats=attempt.stats(now))
        else:
            if attempt.failure is TransferFailure.NONE:
                attempt.failure = TransferFailure.WRITE_FAILED
                attempt.reason = f"every writer is over, {attempt.manifest.missing} (token, layer)s are missing"
            kept = self._let_go(attempt, before)
            outcome = ReceiveOutcome(key, True, attempt.failure, attempt.reason, attempt.stats(now), may_retry=kept)
        self._ledger.release(key)
        del self._open[key]
        end_receive(attempt.span, outcome)
        self._emit(ToScheduler(outcome))

    def _let_go(self, attempt: Attempt, before: ReceiveState) -> bool:
        """After a failure: True when the holder keeps its pages for one more request; otherwise it is told to free them
        where it may not know."""
        key, receive = attempt.key, attempt.receive
        if attempt.request.may_retry and attempt.failure is TransferFailure.WRITE_FAILED and before in _KEPT_IN:
            self._holders.keep(key, attempt.peer, receive)
            return True
        if before in IN_DOUBT:
            self._emit(ToPeer(attempt.peer, Cancel(key, receive)))
        elif before is ReceiveState.QUEUED:
            self._holders.owe(attempt.peer, key, 0)
        return False

    def _give_back(self, key: RequestKey) -> None:
        """A holder that keeps pages for one more request need not wait."""
        kept = self._holders.take_kept(key)
        if kept is not None and self._holders.terms(kept[0]) is None:
            self._holders.owe(kept[0], key, kept[1])
        elif kept is not None:
            self._emit(ToPeer(kept[0], Cancel(key, kept[1])))

    def _decline(self, key: RequestKey, failure: TransferFailure, reason: str) -> None:
        self._give_back(key)
        self._emit(ToScheduler(ReceiveOutcome(key, True, failure, reason)))
