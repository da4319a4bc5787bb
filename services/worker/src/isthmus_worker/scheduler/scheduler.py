"""Continuous batching over one block pool.

Each step computes, within `max_batch_tokens`: first one token for every request that decodes, oldest first; then chunks
of prompts, oldest first. A request is admitted, strictly in order of arrival, when its blocks are there. When decoding
runs out of blocks the youngest running request gives its blocks back and computes them again later.

             admit                              last chunk           end
    WAITING ──┬──▶ PREFILL ───────────────────────┬──▶ DECODE ─────────────▶ RELEASED
       ▲      └──▶ RECEIVING ──cache is here──────┘      │                      ▲
       └─────────────────── preempted ───────────────────┘                      │
    context leg: PREFILL ──▶ OFFERED ───────────send is over────────────────────┤
    failed or aborted while a peer may touch the blocks: ──▶ DRAINING ──settled─┘
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from isthmus_core.errors import (
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    IsthmusError,
    Overloaded,
    RequestCancelled,
)
from isthmus_worker.engine import EngineLoad, EngineRequest, FinishReason, HandoffReport, RequestType
from isthmus_worker.scheduler.events import (
    ContextDone,
    RequestFinished,
    RequestReleased,
    RequestTokens,
    SchedulerEvent,
)
from isthmus_worker.scheduler.request import PINNED, RUNNING, Phase, Request
from isthmus_worker.scheduler.step import StepPlan
from kvtransfer.ports import TransferFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from isthmus_core.keys import RequestKey
    from isthmus_worker.cache import BlockManager
    from isthmus_worker.scheduler.handoffs import Handoffs
    from isthmus_worker.scheduler.limits import Limits
    from kvtransfer.ports import ReceiveOutcome


def _by_arrival(request: Request) -> int:
    return request.arrival


class Scheduler:
    """Decides; the caller brings the clock (`now`, seconds, never going back) and runs the model.

    `emit` takes events in order. `handoffs` is None on an instance that hands nothing off. The caller's cycle is:
    submit and abort, `poll`, `plan`, run the rows, `apply`.
    """

    def __init__(
        self,
        limits: Limits,
        blocks: BlockManager,
        emit: Callable[[SchedulerEvent], None],
        handoffs: Handoffs | None = None,
    ) -> None:
        self._limits, self._blocks, self._emit, self._handoffs = limits, blocks, emit, handoffs
        self._live: dict[RequestKey, Request] = {}
        # Both in order of arrival.
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        # The transceiver was asked to cancel and has not said yet that the blocks may be freed.
        self._cancelling: dict[RequestKey, Request] = {}
        self._arrivals = 0

    @property
    def live(self) -> int:
        """Requests of which anything is left."""
        return len(self._live)

    def submit(self, request: EngineRequest, now: float) -> None:
        """Takes a request into the queue. Raises InvalidRequest, Overloaded or DuplicateRequest; nothing is kept then,
        and no event is emitted."""
        if request.key in self._live:
            raise DuplicateRequest(request.key.request_id)
        self._limits.check(request)
        if request.request_type is not RequestType.CONTEXT_AND_GENERATION and self._handoffs is None:
            raise InvalidRequest("request_type", request.request_type.name, "this instance has no transfer backend")
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded("engine.max_waiting", self._limits.max_waiting)
        taken = Request(request, self._arrivals, now)
        self._arrivals += 1
        self._live[taken.key] = taken
        self._waiting.append(taken)

    def abort(self, key: RequestKey) -> None:
        """Drops a request, wherever it is; nothing when it is gone already. Blocks that a peer may touch are kept."""
        request = self._live.get(key)
        if request is None:
            return
        self._finish(request, None, RequestCancelled())
        if request.phase in (Phase.RECEIVING, Phase.OFFERED):
            self._cancel(request)
        elif request.phase is not Phase.DRAINING:
            self._release(request)

    def poll(self) -> None:
        """Applies what the transceiver has heard. Call between steps."""
        handoffs = self._handoffs
        if handoffs is None:
            return
        for send in handoffs.sends():
            self._release(self._in_handoff(send.key, Phase.OFFERED))
        for receive in handoffs.receives():
            self._received(handoffs, self._in_handoff(receive.key, Phase.RECEIVING), receive)
        for request in list(self._cancelling.values()):
            if handoffs.cancel(request.key):
                self._release(request)

    def plan(self, now: float) -> StepPlan:
        """Rows of the next step. Without rows nothing can be computed until a request, an abort or an outcome comes."""
        step = StepPlan(self._limits.max_batch_tokens)
        for request in [one for one in self._running if one.phase is Phase.DECODE]:
            if not step.left:
                break
            # It may have given its blocks to an older one in this very loop.
            if request.phase is Phase.DECODE and self._room_for(request):
                if request.decode_from is None:
                    request.decode_from = now
                step.add(request, self._blocks.table(request.key))
        self._admit(now)
        for request in self._running:
            if not step.left:
                break
            if request.phase is Phase.PREFILL:
                step.add(request, self._blocks.table(request.key))
        return step

    def apply(self, step: StepPlan, tokens: Sequence[int], failed: Collection[int], now: float) -> None:
        """Takes a step's result: a token for every row that wanted one, and the rows without usable logits."""
        for index, (request, row) in enumerate(zip(step.requests, step.rows, strict=True)):
            request.computed += len(row.token_ids)
            if index in failed:
                error = InternalError(f"the model computed logits that are not finite for request {request.key}")
                self._finish(request, None, error)
                self._release(request)
            elif row.want_token:
                self._take(request, tokens[index], now)

    def load(self) -> EngineLoad:
        """Counts as of now. Blocks in doubt are the hub's to know."""
        return EngineLoad(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            held_handoffs=sum(one.phase is Phase.OFFERED for one in self._live.values()),
            used_blocks=self._blocks.used,
            total_blocks=self._blocks.num_blocks,
        )

    def check_idle(self) -> None:
        """Proves that an idle scheduler holds nothing. Raises InternalError for a leak."""
        if self._live:
            raise InternalError(f"{len(self._live)} requests are left")
        self._blocks.check_integrity()
        if self._waiting or self._running or self._blocks.used:
            raise InternalError(
                f"nothing is left to do, but {len(self._waiting)} requests wait, {len(self._running)} run and "
                f"{self._blocks.used} blocks are held"
            )

    # --- steps

    def _admit(self, now: float) -> None:
        while self._waiting and len(self._running) < self._limits.max_running:
            request = self._waiting[0]
            count = self._blocks.blocks_for(request.length + 1)
            if not self._blocks.can_allocate(count):
                return
            del self._waiting[0]
            self._blocks.allocate(request.key, count)
            if request.admitted_at is None:
                request.admitted_at = now
            insort(self._running, request, key=_by_arrival)
            if request.needs_cache and self._handoffs is not None:
                request.move(Phase.RECEIVING)
                prompt_blocks = self._blocks.blocks_for(request.prompt_length)
                self._handoffs.receive(request, self._blocks.table(request.key)[:prompt_blocks])
            else:
                request.move(Phase.PREFILL)

    def _room_for(self, request: Request) -> bool:
        """Makes sure that the next tokens have blocks. False when the request had to give up its own."""
        more = self._blocks.blocks_for(request.length) - self._blocks.held(request.key)
        if more <= 0:
            return True
        while not self._blocks.can_allocate(more):
            victim = next(one for one in reversed(self._running) if one.phase not in PINNED)
            self._preempt(victim)
            if victim is request:
                return False
        self._blocks.grow(request.key, more)
        return True

    def _preempt(self, request: Request) -> None:
        request.move(Phase.WAITING)
        self._running.remove(request)
        self._blocks.free(request.key)
        request.computed = 0
        insort(self._waiting, request, key=_by_arrival)

    # --- results

    def _take(self, request: Request, token: int, now: float) -> None:
        request.append(token, now)
        self._emit(RequestTokens(request.key, (token,)))
        if request.prefilled_at is None and request.leg is not RequestType.GENERATION_ONLY:
            request.prefilled_at = now
        if token in request.stop:
            self._end(request, FinishReason.STOP)
        elif request.generated == request.source.sampling.max_tokens:
            self._end(request, FinishReason.LENGTH)
        elif request.leg is RequestType.CONTEXT_ONLY:
            self._offer(request, token)
        elif request.phase is Phase.PREFILL:
            request.move(Phase.DECODE)

    def _offer(self, request: Request, token: int) -> None:
        if self._handoffs is None:
            raise InternalError(f"request {request.key} has nobody to offer its cache to")
        request.move(Phase.OFFERED)
        self._running.remove(request)
        prompt_blocks = self._blocks.blocks_for(request.prompt_length)
        self._handoffs.offer(request, self._blocks.table(request.key)[:prompt_blocks])
        request.over = True
        self._emit(ContextDone(request.key, (token,), request.report()))

    def _received(self, handoffs: Handoffs, request: Request, outcome: ReceiveOutcome) -> None:
        if outcome.failure is TransferFailure.NONE and request.phase is Phase.RECEIVING:
            stats = outcome.stats
            request.handoff = None if stats is None else HandoffReport(stats.writers, stats.total)
            request.received = True
            request.computed = request.prompt_length
            request.move(Phase.DECODE)
            return
        if outcome.failure is not TransferFailure.NONE:
            self._finish(request, None, handoffs.error(request, outcome))
        if outcome.settled:
            self._release(request)
        elif request.phase is Phase.RECEIVING:
            self._drain(request)

    def _cancel(self, request: Request) -> None:
        if self._handoffs is None or self._handoffs.cancel(request.key):
            self._release(request)
        else:
            self._drain(request)
            self._cancelling[request.key] = request

    def _drain(self, request: Request) -> None:
        if request.phase in RUNNING:
            self._running.remove(request)
        request.move(Phase.DRAINING)

    def _in_handoff(self, key: RequestKey, phase: Phase) -> Request:
        """The request that an outcome is about. Its blocks are pinned, so it is here."""
        request = self._live.get(key)
        if request is None or request.phase not in (phase, Phase.DRAINING):
            where = "gone" if request is None else request.phase.value
            raise InternalError(f"request {key} is {where} and got the outcome of a hand-off")
        return request

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._finish(request, reason, None)
        self._release(request)

    def _finish(self, request: Request, reason: FinishReason | None, error: IsthmusError | None) -> None:
        """The end of the client's side, once."""
        if not request.over:
            request.over = True
            self._emit(RequestFinished(request.key, reason, error, request.report()))

    def _release(self, request: Request) -> None:
        """The one way out."""
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        else:
            self._blocks.free(request.key)
            if request.phase in RUNNING:
                self._running.remove(request)
        request.move(Phase.RELEASED)
        self._cancelling.pop(request.key, None)
        del self._live[request.key]
        self._emit(RequestReleased(request.key))
