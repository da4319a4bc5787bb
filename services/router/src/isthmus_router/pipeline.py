"""The life of a request, from text to text: tokenise, place, run the legs, detokenise, report.

Knows neither gRPC nor HTTP: both front ends read its parts. Whatever happens to a request (an error, a deadline, a
client that leaves at any await), its placement is finished exactly once and no leg is left behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from isthmus.v1.generation_pb2 import RequestReport

from isthmus_core import token_ids
from isthmus_core.errors import DeadlineExceeded, InternalError, IsthmusError, NoCapacity, UnknownModel
from isthmus_core.ids import check_request_id
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Span, TraceContext, Tracing
from isthmus_router.answer import Answers, TextRules
from isthmus_router.legs import Legs
from isthmus_router.ports import (
    ContextReady,
    Coordinator,
    Finished,
    Placement,
    Sampling,
    Schedule,
    ServedModel,
    Tokens,
    Workers,
)
from isthmus_router.preparation import budget, detokenise, resolve_model, tokenise
from isthmus_router.reporting import attributes, complete, describe
from isthmus_router.requests import ChatInput, End, GenerateRequest, Part, TextInput, TokenInput
from isthmus_router.sampling import check, resolve
from isthmus_router.schedules import Schedules
from isthmus_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Attempts grow when a request is tried again on another placement.
FIRST_ATTEMPT = 0
TOKENISER_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Routed:
    """A request that has a place."""

    key: RequestKey
    tokenizer: Tokenizer
    prompt: Sequence[int]
    sampling: Sampling
    placement: Placement
    deadline: float
    route_s: float


class Pipeline:
    """Serves requests. `tokenizers`: served model name -> tokenizer; `max_text_bytes`: longest text input."""

    def __init__(
        self,
        coordinator: Coordinator,
        workers: Workers,
        tokenizers: Mapping[str, Tokenizer],
        tracing: Tracing,
        *,
        max_text_bytes: int,
        schedule: Schedule = Schedule.CONTEXT_FIRST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._workers = workers
        self._tokenizers = tokenizers
        self._tracing = tracing
        self._max_text_bytes = max_text_bytes
        self._schedules = Schedules(schedule)
        self._clock = clock
        self._executor = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokeniser")
        self._aborts: set[asyncio.Task[None]] = set()
        self._running = 0

    @property
    def running(self) -> int:
        """Requests being served."""
        return self._running

    @property
    def default_model(self) -> str:
        """Model that an empty name means; empty when there are several."""
        return next(iter(self._tokenizers)) if len(self._tokenizers) == 1 else ""

    def models(self) -> list[ServedModel]:
        """Models that can be asked for now: the cluster serves them and this router has their tokenizer."""
        return [model for model in self._coordinator.served() if model.name in self._tokenizers]

    def missing(self) -> list[str]:
        """What keeps the router from serving, for people; empty when it can serve."""
        if not self._coordinator.ready:
            return ["the coordinator can not be reached"]
        if not self.models():
            names = ", ".join(sorted(self._tokenizers))
            return [f"no instance, or no connected pair of context and generation instances, serves {names}"]
        return []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Part | End, None]:
        """Serve a request: any number of Part, then exactly one End. Raises IsthmusError.

        Close the generator (or cancel the task that reads it) to cancel the request.
        """
        span = self._tracing.begin_root(
            request.operation, request.trace, start_ns=request.arrived_ns, attributes=attributes(request)
        )
        error: str | None = "cancelled"
        self._running += 1
        try:
            async with aclosing(self._serve(request, span)) as parts:
                async for part in parts:
                    if isinstance(part, End):
                        error = None
                    yield part
        except IsthmusError as failure:
            error = failure.message
            span.set("error.type", failure.code.name)
            raise
        finally:
            self._running -= 1
            span.end(error=error)

    async def tokenize(self, model: str, source: TextInput | ChatInput) -> tuple[str, list[int], Tokenizer]:
        """(served name, ids, tokenizer) of an input. Raises IsthmusError."""
        name, tokenizer = self._resolve(model)
        limit = self._max_text_bytes
        return name, await tokenise(tokenizer, source, max_bytes=limit, executor=self._executor), tokenizer

    async def detokenize(self, model: str, source: TokenInput, *, skip_special: bool) -> str:
        """Text of ids. Raises IsthmusError."""
        _, tokenizer = self._resolve(model)
        return await detokenise(tokenizer, source, skip_special=skip_special, executor=self._executor)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Wait for withdrawals under way, then let go of the threads. Requests must be over."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(self, request: GenerateRequest, span: Span) -> AsyncGenerator[Part | End, None]:
        routed = await self._route(request, span)
        try:
            async with aclosing(self._answer(request, routed, span)) as parts:
                async for part in parts:
                    yield part
        finally:
            self._coordinator.finish(routed.key)

    async def _route(self, request: GenerateRequest, parent: Span) -> _Routed:
        """Validate, tokenise, place. Holds a placement exactly when it returns."""
        deadline = request.arrived + request.timeout_s
        span = self._tracing.begin("route", parent.context)
        error: str | None = "cancelled"
        try:
            routed = await self._place(request, deadline, span)
            span.set("isthmus.generation_instance", routed.placement.generation.instance_id)
            if routed.placement.context is not None:
                span.set("isthmus.context_instance", routed.placement.context.instance_id)
            parent.set("isthmus.request_id", str(routed.key.request_id))
            parent.set("gen_ai.usage.input_tokens", len(routed.prompt))
            error = None
            return routed
        except IsthmusError as failure:
            error = failure.message
            raise
        finally:
            span.end(error=error)

    async def _place(self, request: GenerateRequest, deadline: float, span: Span) -> _Routed:
        if request.request_id:
            check_request_id(request.request_id)
        model, tokenizer = self._resolve(request.model)
        check(request.sampling, tokenizer.vocab_size)
        try:
            async with asyncio.timeout(self._left(request, deadline)):
                prompt = await tokenise(
                    tokenizer,
                    request.input,
                    max_bytes=self._max_text_bytes,
                    executor=self._executor,
                    limit=self._limit(model),
                )
        except TimeoutError:
            raise DeadlineExceeded("tokenising the request", request.timeout_s) from None
        key = RequestKey(request.request_id or self._coordinator.mint_id(), FIRST_ATTEMPT)
        limit = self._limit(model)
        if limit is None:
            await self._explain_unserved(key, model, len(prompt), span.context, self._left(request, deadline))
            raise NoCapacity(f"model {model} is only just being served", retry_after_s=0.1)
        max_tokens = budget(
            len(prompt),
            limit,
            requested=request.max_tokens,
            default=request.default_max_tokens,
            input_field=request.input.field,
            max_tokens_field=request.max_tokens_field,
        )
        seed = random.getrandbits(64)
        sampling = resolve(request.sampling, tokenizer.defaults, tokenizer.eos_ids, max_tokens, seed)
        placement = await self._coordinator.select(
            key, model, len(prompt), max_tokens, span.context, self._left(request, deadline)
        )
        route_s = self._clock() - request.arrived
        return _Routed(key, tokenizer, prompt, sampling, placement, deadline, route_s)

    async def _explain_unserved(
        self, key: RequestKey, model: str, prompt_tokens: int, trace: TraceContext | None, timeout_s: float
    ) -> None:
        """Let the coordinator say why the model has no placement: it knows who is missing. Normally raises."""
        await self._coordinator.select(key, model, prompt_tokens, 1, trace, timeout_s)
        self._coordinator.finish(key)

    def _resolve(self, model: str) -> tuple[str, Tokenizer]:
        try:
            return resolve_model(model, self._tokenizers)
        except UnknownModel as error:
            raise UnknownModel(model, [served.name for served in self.models()]) from error

    async def _answer(self, request: GenerateRequest, routed: _Routed, span: Span) -> AsyncGenerator[Part | End, None]:
        answers = _answers(request, routed)
        report = RequestReport()
        first_token_s: float | None = None
        handed_off = False
        legs = self._legs(request, routed, span)
        if legs.schedule is not None:
            span.set("isthmus.schedule", legs.schedule.value)
        async with aclosing(legs.run()) as events:
            async for event in events:
                match event:
                    case Tokens():
                        chunks: Sequence[Tokens] = (event,)
                    case ContextReady():
                        handed_off = True
                        report.MergeFrom(event.report)
                        chunks = event.first_tokens
                    case Finished():
                        report.MergeFrom(event.report)
                        answers.check_ended()
                        break
                for part in filter(None, map(answers.push, chunks)):
                    if first_token_s is None and part.token_ids:
                        first_token_s = self._clock() - request.arrived
                        span.event("first_token")
                    yield part
                if answers.cut_short:
                    # Leaving the legs cancels what the workers would still do.
                    break
            else:
                raise InternalError(f"the legs of request {routed.key} ended without an end")
        total_s = self._clock() - request.arrived
        if legs.schedule is not None:
            span.set("isthmus.schedule", legs.schedule.value)  # as it turned out
        complete(report, routed.placement, handed_off, routed.route_s, first_token_s, total_s)
        describe(span, answers.reasons, answers.tokens, report)
        cached = report.cached_tokens
        yield End(routed.key.request_id, len(routed.prompt), answers.tokens, cached, report)

    def _legs(self, request: GenerateRequest, routed: _Routed, span: Span) -> Legs:
        return Legs(
            self._workers,
            routed.key,
            routed.placement,
            prompt=token_ids.pack(routed.prompt),
            sampling=routed.sampling,
            cache_salt=request.cache_salt,
            trace=span.context,
            left=lambda: self._left(request, routed.deadline),
            timeout_s=request.timeout_s,
            withdraw=self._withdraw,
            schedules=self._schedules,
        )

    def _left(self, request: GenerateRequest, deadline: float) -> float:
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded("the request", request.timeout_s)
        return left

    def _limit(self, model: str) -> int | None:
        return next((served.max_model_len for served in self._coordinator.served() if served.name == model), None)

    def _withdraw(self, placement: Placement, key: RequestKey) -> None:
        """Tell the context instance, in the background, that nobody will fetch the pages of `key`."""
        task = asyncio.get_running_loop().create_task(self._abort(placement, key))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, placement: Placement, key: RequestKey) -> None:
        if placement.context is None:
            return
        try:
            await self._workers.abort(placement.context, key)
        except IsthmusError as error:
            # Its hold deadline frees the pages.
            logger.info(
                "context leg could not be withdrawn: %s",
                error.message,
                extra={"request_id": key.request_id, "peer": placement.context.instance_id},
            )


def _answers(request: GenerateRequest, routed: _Routed) -> Answers:
    options, tokenizer = request.sampling, routed.tokenizer
    rules = TextRules(
        options.stop, frozenset(routed.sampling.stop_token_ids), options.include_stop, routed.sampling.min_tokens
    )
    return Answers(
        routed.key.request_id,
        routed.sampling.n,
        rules,
        tokenizer.eos_ids,
        lambda: tokenizer.detokenizer(skip_special=options.skip_special),
        tokenizer.token_bytes,
    )
