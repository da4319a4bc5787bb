"""The first part of a request's life: everything that is checked, made and asked for before an instance works on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from isthmus_core import token_ids
from isthmus_core.errors import DeadlineExceeded, IsthmusError, NoCapacity, UnknownModel
from isthmus_core.ids import check_request_id
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Span, TraceContext
from isthmus_router.admission import Admission
from isthmus_router.affinity import affinity_key
from isthmus_router.attempts import Attempts, Job, Shared
from isthmus_router.ports import PlacementRequest, Sampling
from isthmus_router.preparation import budget, resolve_model, split_adapter, tokenise
from isthmus_router.reporting import describe_placement
from isthmus_router.requests import GenerateRequest
from isthmus_router.rules import Rules
from isthmus_router.sampling import check, resolve
from isthmus_router.tokenizer import Tokenizer

# Attempts grow when a request is tried again on another placement.
FIRST_ATTEMPT = 0
# What an answer without a limit is thought to cost, for fairness between tenants: few use what they may.
_USUAL_ANSWER = 256
_LEASE_POLL_S = 0.1
# A coordinator places requests a moment before it says that the model is served; with a local policy, which places by
# what was known before the coordinator was restarted, some seconds before.
_NEWS_S, _NEWS_POLL_S = 5.0, 0.01


@dataclass(frozen=True, slots=True)
class Routed:
    """A request that has a place. `prompt`: token ids. `route_s`: seconds since it arrived."""

    key: RequestKey
    tokenizer: Tokenizer
    prompt: Sequence[int]
    sampling: Sampling
    attempts: Attempts
    route_s: float


class Routing:
    """Validates, tokenises, admits and places. Options as for `Pipeline`."""

    def __init__(
        self,
        shared: Shared,
        tokenizers: Mapping[str, Tokenizer],
        rules: Rules,
        admission: Admission,
        executor: Executor,
        *,
        max_text_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._shared, self._coordinator = shared, shared.coordinator
        self._tokenizers = tokenizers
        self._rules, self._admission, self._executor = rules, admission, executor
        self._max_text_bytes = max_text_bytes
        self._clock = clock

    def resolve(self, model: str) -> tuple[str, Tokenizer]:
        """Served name and tokenizer. Raises UnknownModel or InvalidRequest."""
        try:
            return resolve_model(split_adapter(model, self._tokenizers)[0], self._tokenizers)
        except UnknownModel as error:
            known = [served.name for served in self._coordinator.served() if served.name in self._tokenizers]
            raise UnknownModel(model, known) from error

    async def route(self, request: GenerateRequest, parent: Span) -> Routed:
        """Find a place. When it returns it is held, and so is one of the admission's; when it raises, neither is."""
        span = self._shared.tracing.begin("route", parent.context)
        error: str | None = "cancelled"
        try:
            routed = await self._route(request, span)
            describe_placement(span, routed.attempts.placement)
            parent.set("isthmus.request_id", str(routed.key.request_id))
            parent.set("gen_ai.usage.input_tokens", len(routed.prompt))
            error = None
            return routed
        except IsthmusError as failure:
            error = failure.message
            raise
        finally:
            span.end(error=error)

    async def _route(self, request: GenerateRequest, span: Span) -> Routed:
        deadline = request.arrived + request.timeout_s

        def left() -> float:
            seconds = deadline - self._clock()
            if seconds <= 0:
                raise DeadlineExceeded("the request", request.timeout_s)
            return seconds

        if request.request_id:
            check_request_id(request.request_id)
        model, tokenizer = self.resolve(request.model)
        check(request.sampling, tokenizer.vocab_size)
        # Before anything is computed: a refusal must be cheap.
        self._admission.check(request.tenant)
        if request.quota is not None:
            request.quota.check_tokens()
        prompt = await self._tokenise(request, model, tokenizer, left())
        if request.quota is not None:
            request.quota.spend_tokens(len(prompt))
        sampling = await self._settle(request, model, tokenizer, prompt, span.context, left)
        await self._admission.enter(request.tenant, len(prompt) + (request.max_tokens or _USUAL_ANSWER), left())
        try:
            # Here, where the number of those who wait is bounded.
            key = await self._key(request.request_id, left)
            schedule, shape = self._rules.schedule.decide(request.wish, len(prompt))
            local = self._rules.local_prefill.most_uncached(len(prompt)) if request.wish is None else 0
            question = PlacementRequest(
                key,
                model,
                len(prompt),
                sampling.max_tokens,
                prompt=token_ids.pack(prompt),
                cache_salt=request.cache_salt,
                adapter=split_adapter(request.model, self._tokenizers)[1],
                affinity=affinity_key(request.session, request.tenant, request.input),
                shape=shape,
                local_prefill_tokens=local,
            )
            attempts = Attempts(self._shared, Job(question, sampling, schedule, request.timeout_s, left))
            await attempts.place(span.context)
        except BaseException:
            self._admission.leave()
            raise
        return Routed(key, tokenizer, prompt, sampling, attempts, self._clock() - request.arrived)

    async def _key(self, asked: int, left: Callable[[], float]) -> RequestKey:
        """The client's id, or a new one. A coordinator that is being started again is waited for. Raises NoCapacity."""
        while not asked:
            try:
                asked = self._coordinator.mint_id()
            except NoCapacity:
                if self._coordinator.ready:
                    raise
                await asyncio.sleep(min(_LEASE_POLL_S, left()))
        return RequestKey(asked, FIRST_ATTEMPT)

    async def _tokenise(
        self, request: GenerateRequest, model: str, tokenizer: Tokenizer, timeout_s: float
    ) -> Sequence[int]:
        try:
            async with asyncio.timeout(timeout_s):
                return await tokenise(
                    tokenizer,
                    request.input,
                    max_bytes=self._max_text_bytes,
                    executor=self._executor,
                    limit=self._limit(model),
                )
        except TimeoutError:
            raise DeadlineExceeded("tokenising the request", request.timeout_s) from None

    async def _settle(
        self,
        request: GenerateRequest,
        model: str,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        trace: TraceContext | None,
        left: Callable[[], float],
    ) -> Sampling:
        """The sampling of the request, with its budget of tokens. Raises IsthmusError."""
        limit = self._limit(model)
        if limit is None:
            key = await self._key(request.request_id, left)
            await self._explain_unserved(key, model, len(prompt), trace, left())
            limit = await self._limit_soon(model, left)
        max_tokens = budget(
            len(prompt),
            limit,
            requested=request.max_tokens,
            default=request.default_max_tokens,
            input_field=request.input.field,
            max_tokens_field=request.max_tokens_field,
        )
        seed = random.getrandbits(64)
        return resolve(request.sampling, tokenizer.defaults, tokenizer.eos_ids, max_tokens, seed)

    async def _explain_unserved(
        self, key: RequestKey, model: str, prompt_tokens: int, trace: TraceContext | None, timeout_s: float
    ) -> None:
        """Let the coordinator say why the model has no placement: it knows who is missing. Normally raises."""
        await self._coordinator.select(PlacementRequest(key, model, prompt_tokens, 1, trace), timeout_s)
        self._coordinator.finish(key)

    async def _limit_soon(self, model: str, left: Callable[[], float]) -> int:
        """The model has a place: the news of it are on their way. Raises NoCapacity when they do not come."""
        until = self._clock() + _NEWS_S
        while (limit := self._limit(model)) is None:
            if self._clock() >= until:
                raise NoCapacity(f"model {model} is only just being served", retry_after_s=0.1)
            await asyncio.sleep(min(_NEWS_POLL_S, left()))
        return limit

    def _limit(self, model: str) -> int | None:
        return next((served.max_model_len for served in self._coordinator.served() if served.name == model), None)
