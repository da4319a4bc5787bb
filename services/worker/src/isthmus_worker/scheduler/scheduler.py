"""Continuous batching over one block pool.

Each step computes at most `max_batch_tokens` tokens: one for every answer that decodes, and chunks of prompts, oldest
first. Neither can starve the other: while prompts wait a quarter of the step is theirs, the rest is for decoding first,
and what one side leaves the other may take. When not every decoding answer fits, those come first that have waited
longest for a step. Requests are admitted strictly in order of arrival, when their blocks are there. When decoding runs
out of blocks the youngest answer gives its blocks back and computes them again later.

             admit                              last chunk           end
    WAITING ──┬──▶ PREFILL ───────────────────────┬──▶ DECODE ─────────────▶ RELEASED
       ▲      └──▶ RECEIVING ──cache is here──────┘      │                      ▲
       └─────────────────── preempted ───────────────────┘                      │
    context leg: PREFILL ──▶ OFFERED ───────────send is over────────────────────┤
    failed or aborted while a peer may touch the blocks: ──▶ DRAINING ──settled─┘

A request with n answers is one prefill (or one hand-off) of its lead answer; then the others part from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from isthmus_core.errors import DuplicateRequest, InternalError, InvalidRequest, Overloaded, RequestCancelled
from isthmus_worker.engine import EngineLoad, EngineRequest, KvEvent, RequestType, Tokens
from isthmus_worker.marks import add_chunk
from isthmus_worker.scheduler.answer import Answer, Phase
from isthmus_worker.scheduler.drafts import joined, kept, look_up
from isthmus_worker.scheduler.events import RequestTokens, SchedulerEvent
from isthmus_worker.scheduler.live import Live
from isthmus_worker.scheduler.places import Places
from isthmus_worker.scheduler.request import Request
from isthmus_worker.scheduler.service_rate import ServiceRate
from isthmus_worker.scheduler.step import StepPlan
from isthmus_worker.scheduler.transfers import Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from isthmus_core.keys import RequestKey
    from isthmus_worker.runner import Drawn
    from isthmus_worker.scheduler.handoffs import Handoffs
    from isthmus_worker.scheduler.limits import Limits
    from isthmus_worker.scheduler.memory import Memory


class Scheduler:
    """Decides; the caller brings the clock (`now`, seconds, never going back) and runs the model.

    `emit` takes events in order. `handoffs` is None on an instance that hands nothing off. The caller's cycle is:
    submit and abort, `poll`, `plan`, make the copies, run the rows, `apply`; only then may events be sent.
    """

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        emit: Callable[[SchedulerEvent], None],
        handoffs: Handoffs | None = None,
    ) -> None:
        self._limits, self._memory = limits, memory
        self._places = Places(memory, limits.max_running)
        self._live = Live(self._places, memory, emit)
        self._transfers = None if handoffs is None else Transfers(handoffs, limits, self._live, self._places, memory)
        self._rate = ServiceRate()
        self._arrivals = self._steps = 0
        self._planned_at = 0.0

    @property
    def live(self) -> int:
        """Requests of which anything is left."""
        return len(self._live.requests)

    def prompt_names(self, request: EngineRequest) -> list[bytes]:
        """Names of the whole blocks of a request's prompt."""
        return self._memory.prompt_names(request)

    def cached_share(self, request: EngineRequest, names: Sequence[bytes]) -> float:
        """How much of a prompt with these names is here, in [0, 1)."""
        prompt, receive = len(request.prompt), request.request_type is RequestType.GENERATION_ONLY
        return self._memory.cached_tokens(names, prompt, receive=receive) / prompt if names else 0.0

    def submit(self, request: EngineRequest, now: float, names: Sequence[bytes] = ()) -> None:
        """Takes a request into the queue. `names`: of its prompt, when they are known. Raises InvalidRequest,
        Overloaded or DuplicateRequest; nothing is kept then, and no event is emitted."""
        if request.key in self._live.requests:
            raise DuplicateRequest(request.key.request_id)
        self._limits.check(request)
        if request.request_type is not RequestType.CONTEXT_AND_GENERATION and self._transfers is None:
            raise InvalidRequest("request_type", request.request_type.name, "this instance has no transfer backend")
        waiting, limit = self._waiting(), self._limits.max_waiting
        if waiting >= limit:
            raise Overloaded("engine.max_waiting", limit, self._rate.wait_s(waiting, now))
        taken = Request(request, self._arrivals, now)
        taken.lead.names = list(names)
        self._arrivals += 1
        self._live.requests[taken.key] = taken
        if self._transfers is not None and request.context is not None:
            self._transfers.intend(taken)
        else:
            self._places.enqueue(taken.lead)

    def abort(self, key: RequestKey) -> None:
        """Drops a request, wherever it is; nothing when it is gone already. Blocks that a peer may touch are kept."""
        request = self._live.requests.get(key)
        if request is None:
            return
        self._live.finish(request, RequestCancelled())
        self._drop(request)

    def poll(self) -> None:
        """Applies what the transceiver has heard. Call between steps."""
        if self._transfers is not None:
            self._transfers.poll()

    def plan(self, now: float) -> StepPlan:
        """The next step. Without rows nothing can be computed until a request, an abort or an outcome comes; copies are
        to be made all the same."""
        self._steps += 1
        self._planned_at = now
        step = StepPlan(self._steps, self._limits.max_batch_tokens, self._live.copies)
        self._live.copies = []
        filling = self._transfers is not None and self._transfers.arrived < self._limits.fill_gate
        decoding = [one for one in self._places.running if one.phase is Phase.DECODE and not filling]
        prompts = self._places.waiting or len(decoding) < len(self._places.running)
        share = self._share_of_prompts(step.left) if prompts else 0
        if len(decoding) > step.left - share:
            decoding.sort(key=lambda one: one.stepped)
        self._decode(step, decoding, share, now)
        self._admit(now)
        for answer in list(self._places.running):
            if not step.left:
                break
            fits = answer.phase is Phase.PREFILL and self._places.room_for(answer, step.share(answer), step.number)
            if fits:
                step.add(answer, self._memory.lists(answer))
        self._decode(step, decoding, 0, now)
        if self._transfers is not None:
            for answer, row in zip(step.answers, step.rows, strict=True):
                if row.draws and answer.phase is Phase.PREFILL:
                    self._transfers.offer_early(answer)
        self._tell_cache()
        return step

    def apply(self, step: StepPlan, drawn: Sequence[tuple[Drawn, ...]], failed: Collection[int], now: float) -> None:
        """Takes a step's result: what was drawn from each row, and the rows without usable logits."""
        for index, (answer, row) in enumerate(zip(step.answers, step.rows, strict=True)):
            if answer.phase is Phase.RELEASED:
                continue  # another answer of its request has failed in this step
            if answer.phase is Phase.PREFILL:
                begin, end = answer.computed, answer.computed + len(row.token_ids)
                add_chunk(answer.request.marks, begin, end, self._planned_at, now)
            tried, answer.proposed = answer.proposed, ()
            taken = drawn[index][: kept(drawn[index], tried)] if tried and drawn[index] else drawn[index]
            answer.computed += len(row.token_ids) - (1 + len(tried) - len(taken) if tried else 0)
            if index in failed:
                self._fail(answer.request)
                continue
            self._memory.commit(answer)
            request = answer.request
            computed = request.received and answer.computed >= request.prompt_length
            if request.unborn and request.knows_first and computed:
                self._live.part(request)
            if tried:
                self._take_guessed(answer, taken, len(tried), now)
            elif row.draws:
                self._take(answer, taken, now)
            elif request.bound and self._transfers is not None:
                self._transfers.offer_chunk(request)

    def load(self) -> EngineLoad:
        """Counts as of now. Blocks that are only kept for reuse are not used; those in doubt are the hub's to know."""
        return EngineLoad(
            running_requests=len(self._places.running_requests()),
            waiting_requests=self._waiting(),
            held_handoffs=0 if self._transfers is None else len(self._transfers.offered),
            used_blocks=self._memory.cache.used,
            total_blocks=max(self._memory.cache.num_blocks),
            receive_credits=self._credits(),
        )

    def _credits(self) -> int:
        """Blocks that caches from elsewhere may take: the admission window of an instance that hands off."""
        if self._transfers is None:
            return 0
        return max(0, self._memory.cache.free_blocks() - self._places.spare_blocks())

    def check_idle(self) -> None:
        """Proves that an idle scheduler holds nothing. Raises InternalError for a leak."""
        if self.live:
            raise InternalError(f"{self.live} requests are left")
        self._places.check_empty()
        if self._transfers is not None:
            self._transfers.arrived = 0

    # --- steps

    def _share_of_prompts(self, budget: int) -> int:
        """Tokens of a step that decoding leaves to prompts."""
        return max(1, budget // 4) if budget > 1 else self._steps % 2

    def _decode(self, step: StepPlan, answers: Iterable[Answer], leave: int, now: float) -> None:
        for answer in answers:
            if step.left <= leave:
                return
            # It may have given its blocks to an older one in this very loop.
            fits = answer.phase is Phase.DECODE and answer.stepped[0] != step.number
            if fits and answer.drafts and not self._memory.can_step(answer, step.share(answer)):
                answer.drafts = ()  # nobody gives up blocks for a guess
            if fits and self._places.room_for(answer, step.share(answer), step.number):
                if answer.request.decode_from is None:
                    answer.request.decode_from = now
                step.add(answer, self._memory.lists(answer))

    def _admit(self, now: float) -> None:
        transfers, waiting = self._transfers, self._places.waiting
        while waiting and (transfers is None or transfers.may_hold(waiting[0])):
            answer = self._places.admit()
            if answer is None:
                return
            request = answer.request
            if request.admitted_at is None:
                request.admitted_at, request.cached_tokens = now, self._memory.reused_tokens(answer)
                self._rate.note(now)
            if transfers is not None:
                if answer.phase is Phase.RECEIVING:
                    transfers.receive(answer)
                elif request.source.generation_waits:
                    transfers.bind(request)

    def _tell_cache(self) -> None:
        stored, removed = self._memory.cache.take_changes()
        if stored or removed:
            self._live.emit(KvEvent(stored, removed))

    # --- results

    def _take(self, answer: Answer, drawn: tuple[Drawn, ...], now: float) -> None:
        request = answer.request
        request.took(len(drawn), now)
        answer.append(drawn[0].token)
        own = request.chunk(answer.sample, drawn[0], answer.generated)
        first = zip(request.unborn, drawn[1:], strict=True)
        request.unborn = [request.chunk(one.sample, token, 1) for one, token in first]
        chunks = (own, *request.unborn)
        if request.leg is RequestType.CONTEXT_ONLY and any(chunk.reason is None for chunk in chunks):
            if self._limits.draft_tokens and len(chunks) == 1:
                chunks = (replace(own, drafts=look_up(answer.tokens(), self._limits.draft_tokens)),)
            self._offer(request, chunks)
            return
        for chunk in chunks:
            self._live.emit(RequestTokens(request.key, chunk))
        if request.unborn:
            self._live.part(request)
        if own.reason is not None and request.bound and self._transfers is not None:
            self._transfers.ended(request, chunks)
        elif own.reason is not None:
            self._live.end(answer)
        elif answer.phase is Phase.PREFILL:
            answer.move(Phase.DECODE)

    def _take_guessed(self, answer: Answer, drawn: tuple[Drawn, ...], tried: int, now: float) -> None:
        """What was drawn behind the last token and those of `tried` drafts that were right."""
        request, chunks = answer.request, list[Tokens]()
        for one in drawn:
            answer.append(one.token)
            chunks.append(request.chunk(answer.sample, one, answer.generated))
            if chunks[-1].reason is not None:
                break
        request.took(len(chunks), now)
        request.drafts += tried
        request.accepted_drafts += len(chunks) - 1
        self._live.emit(RequestTokens(request.key, joined(chunks)))
        if chunks[-1].reason is not None:
            self._live.end(answer)

    def _offer(self, request: Request, first_tokens: tuple[Tokens, ...]) -> None:
        if self._transfers is None:
            raise InternalError(f"request {request.key} has nobody to offer its cache to")
        self._transfers.offer(request, first_tokens)

    def _fail(self, request: Request) -> None:
        """The model has no answer. What it has computed for this request is not used for others."""
        self._memory.distrust(request)
        error = InternalError(f"the model computed logits that are not finite for request {request.key}")
        self._live.finish(request, error)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        """Blocks that a peer may touch are kept until they are settled."""
        if self._transfers is not None and self._transfers.concerns(request):
            self._transfers.cancel(request)
        elif request.lead.phase is not Phase.DRAINING:
            self._live.release(request)

    def _waiting(self) -> int:
        """Answers in the queue, and legs that wait for another one before they join it."""
        return len(self._places.waiting) + (0 if self._transfers is None else len(self._transfers.awaiting))
