"""The life of a request, from text to text: tokenise, place, run the legs, detokenise, report.

Knows neither gRPC nor HTTP: both front ends read its parts. Whatever happens to a request (an error, a deadline, a
client that leaves at any await), its placement is finished exactly once and no leg is left behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from isthmus_core.errors import DeadlineExceeded, InternalError, IsthmusError
from isthmus_core.generation import singles
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Span, Tracing
from isthmus_router.admission import Admission
from isthmus_router.answer import Answers, TextRules
from isthmus_router.attempts import Shared
from isthmus_router.breaker import Breakers
from isthmus_router.ports import (
    ContextReady,
    Coordinator,
    Finished,
    Placement,
    ServedModel,
    Tokens,
    Workers,
)
from isthmus_router.preparation import detokenise, tokenise
from isthmus_router.recorder import RequestRecord, RequestRecorder
from isthmus_router.reporting import attributes, complete, describe
from isthmus_router.requests import ChatInput, End, GenerateRequest, Part, TextInput, TokenInput
from isthmus_router.retry import RetryBudget
from isthmus_router.routing import Routed, Routing
from isthmus_router.rules import Rules
from isthmus_router.schedules import Schedules
from isthmus_router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# A client's own timer may end its request a little before this one's would.
_CROSSING_S = 0.05

# Attempts grow when a request is tried again on another placement.
FIRST_ATTEMPT = 0
TOKENISER_THREADS = 2


class Pipeline:
    """Serves requests. `tokenizers`: served model name -> tokenizer; `max_text_bytes`: longest text input;
    `one_by_one`: each token is a part of its own, also when several have come together."""

    def __init__(
        self,
        coordinator: Coordinator,
        workers: Workers,
        tokenizers: Mapping[str, Tokenizer],
        tracing: Tracing,
        *,
        max_text_bytes: int,
        rules: Rules | None = None,
        recorder: RequestRecorder | None = None,
        one_by_one: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rules, recorder = rules or Rules(), recorder or RequestRecorder()
        self._shared = Shared(
            coordinator,
            workers,
            tracing,
            Schedules(),
            rules.retry,
            RetryBudget(rules.retry.budget_share, clock),
            Breakers(clock, threshold=rules.breaker_failures, cool_down_s=rules.breaker_s),
            withdraw=self._withdraw,
            retried=recorder.retried,
        )
        self._coordinator = coordinator
        self._workers = workers
        self._tokenizers = tokenizers
        self._tracing = tracing
        self._max_text_bytes, self._one_by_one = max_text_bytes, one_by_one
        self._clock = clock
        self._executor = ThreadPoolExecutor(TOKENISER_THREADS, thread_name_prefix="tokeniser")
        self._admission = Admission(rules.admission, clock)
        self._routing = Routing(
            self._shared, tokenizers, rules, self._admission, self._executor, max_text_bytes=max_text_bytes, clock=clock
        )
        self._aborts: set[asyncio.Task[None]] = set()
        self._running = 0
        self._recorder = recorder
        self._recorder.watch(lambda: self._running, lambda: coordinator.ready)

    def refused(self, error: IsthmusError) -> None:
        """A front end has refused a request that never came here: it is counted."""
        self._recorder.refused(error)

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
        span = self._tracing.begin_root(request.operation, request.trace, start_ns=request.arrived_ns)
        if span.recording:
            span.update(attributes(request))
        record = self._recorder.begin(request, span.context)
        end: End | None = None
        failure: IsthmusError | None = None
        said = 0
        self._running += 1
        try:
            async with aclosing(self._serve(request, span, record)) as parts:
                async for part in parts:
                    if isinstance(part, End):
                        end = part
                    else:
                        said += len(part.token_ids)
                    yield part
        except IsthmusError as error:
            failure = error
            raise
        finally:
            self._running -= 1
            if request.quota is not None:
                request.quota.spend_tokens(said)  # also of an answer that nobody read to its end
            if end is None and failure is None and request.arrived + request.timeout_s - self._clock() < _CROSSING_S:
                failure = DeadlineExceeded("the request", request.timeout_s)
            if failure is not None:
                span.set("error.type", failure.code.name.lower())
            span.end(error=None if end is not None else "cancelled" if failure is None else failure.message)
            record.ended(end, failure)

    async def tokenize(self, model: str, source: TextInput | ChatInput) -> tuple[str, list[int], Tokenizer]:
        """(served name, ids, tokenizer) of an input. Raises IsthmusError."""
        name, tokenizer = self._routing.resolve(model)
        limit = self._max_text_bytes
        return name, await tokenise(tokenizer, source, max_bytes=limit, executor=self._executor), tokenizer

    async def detokenize(self, model: str, source: TokenInput, *, skip_special: bool) -> str:
        """Text of ids. Raises IsthmusError."""
        _, tokenizer = self._routing.resolve(model)
        return await detokenise(tokenizer, source, skip_special=skip_special, executor=self._executor)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Wait for withdrawals under way, then let go of the threads. Requests must be over."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=timeout_s)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _serve(
        self, request: GenerateRequest, span: Span, record: RequestRecord
    ) -> AsyncGenerator[Part | End, None]:
        routed = await self._routing.route(request, span)
        record.key, record.retries = routed.key, routed.attempts.retry_kinds
        try:
            async with aclosing(self._answer(request, routed, span)) as parts:
                async for part in parts:
                    yield part
        finally:
            record.fell_back = routed.attempts.fell_back
            routed.attempts.release()
            self._admission.leave()

    async def _answer(self, request: GenerateRequest, routed: Routed, span: Span) -> AsyncGenerator[Part | End, None]:
        answers = _answers(request, routed)
        attempts = routed.attempts
        first_token_s: float | None = None
        if attempts.schedule is not None:
            span.set("isthmus.schedule", attempts.schedule.value)
        async with aclosing(attempts.events(span)) as events:
            async for event in events:
                match event:
                    case Tokens():
                        chunks: Sequence[Tokens] = singles(event) if self._one_by_one else (event,)
                    case ContextReady():
                        chunks = event.first_tokens
                    case Finished():
                        answers.check_ended()
                        break
                for part in filter(None, map(answers.push, chunks)):
                    if part.reason is not None:
                        attempts.ended(part.index)
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
        if attempts.schedule is not None:
            span.set("isthmus.schedule", attempts.schedule.value)  # as it turned out
        report = attempts.report
        report.retries.extend(attempts.retries)
        complete(report, attempts.placement, attempts.handed_off, routed.route_s, first_token_s, total_s)
        describe(span, answers.reasons, answers.tokens, report)
        cached = report.cached_tokens
        yield End(routed.key.request_id, len(routed.prompt), answers.tokens, cached, report)

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


def _answers(request: GenerateRequest, routed: Routed) -> Answers:
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
