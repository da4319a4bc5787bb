"""One request over as many tries as it takes: place it, run its legs, and when instances fail, go on elsewhere.

The client sees one stream. Whatever a try has sent stays; the next one continues behind it (`resume`). A placement is
finished exactly once, before the next one is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import grpc
from isthmus.v1 import errors_pb2
from isthmus.v1.generation_pb2 import RequestReport

from isthmus_core.errors import IsthmusError
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Span, TraceContext, Tracing
from isthmus_router.breaker import Breakers
from isthmus_router.legs import Legs
from isthmus_router.merge import merged
from isthmus_router.ports import (
    ContextReady,
    Coordinator,
    Finished,
    InstanceRef,
    LegEvent,
    Placement,
    PlacementRequest,
    Sampling,
    Schedule,
    Tokens,
    Workers,
)
from isthmus_router.reporting import describe_placement
from isthmus_router.resume import Said, Work
from isthmus_router.retry import RetryBudget, RetryPolicy, reason_word, worth_another
from isthmus_router.schedules import Schedules

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be done. `question`: of the first try. `schedule`: what the client or the router's policy wants.
    `left()`: seconds until the deadline, raises DeadlineExceeded; `timeout_s`: what the client was promised."""

    question: PlacementRequest
    sampling: Sampling
    schedule: Schedule
    timeout_s: float
    left: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Shared:
    """What all requests of a router have in common. `withdraw(placement, key)`: as for `Legs`. `retried(reason)`: a
    request goes on elsewhere, for a reason out of `retry.reason_word`."""

    coordinator: Coordinator
    workers: Workers
    tracing: Tracing
    schedules: Schedules
    policy: RetryPolicy
    budget: RetryBudget
    breakers: Breakers
    withdraw: Callable[[Placement, RequestKey], None]
    retried: Callable[[str], None] = lambda _: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


class Attempts:
    """The tries of one request. `place`, then `events` once, then `release`, whatever happens in between.

    `report`: what the instances said of the last try. `retries`: why the earlier ones ended.
    """

    def __init__(self, shared: Shared, job: Job) -> None:
        self._shared = shared
        self._job = job
        self._key = job.question.key
        self._said = Said(job.sampling.n)
        self._placement: Placement | None = None
        # Key under which the coordinator knows the placement.
        self._held: RequestKey | None = None
        # The coordinator has been told that the prompt is computed.
        self._prefilled = False
        self._failed: dict[bytes, None] = {}
        self._legs: list[Legs] = []
        self.report = RequestReport()
        self.retries: list[str] = []
        self.retry_kinds: list[str] = []
        self.handed_off = False

    @property
    def placement(self) -> Placement:
        """Where the request is, or was last."""
        if self._placement is None:
            raise RuntimeError("call place first")
        return self._placement

    @property
    def schedule(self) -> Schedule | None:
        """Of the last try; None when one instance does everything."""
        return self._legs[0].schedule if self._legs else self._shared.schedules.of(self.placement, self._job.schedule)

    @property
    def fell_back(self) -> bool:
        """True when the pair does not know how to start both legs at once, which was wanted."""
        return self._job.schedule is Schedule.GENERATION_FIRST and self.schedule is Schedule.CONTEXT_FIRST

    def ended(self, sample: int) -> None:
        """An answer is over for the client: no later try goes on with it."""
        self._said.end(sample)

    async def place(self, trace: TraceContext | None) -> None:
        """Ask for instances. Raises IsthmusError; then nothing is held."""
        avoid = tuple(dict.fromkeys((*self._failed, *self._shared.breakers.open())))
        question = replace(self._job.question, key=self._key, trace=trace, excluded=avoid)
        try:
            placement = await self._shared.coordinator.select(question, self._job.left())
        except IsthmusError as error:
            if not avoid or not isinstance(error.detail, errors_pb2.NoCapacity):
                raise
            # An instance that has failed is better than none.
            placement = await self._shared.coordinator.select(replace(question, excluded=()), self._job.left())
        self._placement, self._held, self._prefilled = placement, self._key, False

    def release(self) -> None:
        """Give the placement back. May be called again."""
        if self._held is not None:
            self._shared.coordinator.finish(self._held)
            self._held = None

    async def events(self, span: Span) -> AsyncGenerator[LegEvent, None]:
        """Events of all tries as those of one; ends with Finished. Raises IsthmusError."""
        self._shared.budget.request()
        while True:
            try:
                async with aclosing(self._try(span.context)) as events:
                    async for event in events:
                        yield event
                for instance in _instances(self.placement):
                    self._shared.breakers.succeeded(instance.incarnation)
                return
            except IsthmusError as error:
                if not self._rest():
                    # The instance was lost between its last token and its last word.
                    yield Finished(RequestReport())
                    return
                await self._place_again(error, span)

    def _rest(self) -> Sequence[Work]:
        return self._said.rest(self._job.question.prompt, self._job.sampling)

    async def _try(self, trace: TraceContext | None) -> AsyncGenerator[LegEvent, None]:
        """One try with everything that is left to do."""
        self.report, self.handed_off = RequestReport(), False
        works = self._rest()
        self._legs = [self._make_legs(work, number, trace) for number, work in enumerate(works)]
        decoded, running = 0, len(works)
        async with aclosing(merged([legs.run() for legs in self._legs])) as events:
            async for number, event in events:
                if not self._prefilled:
                    self._prefilled = True
                    self._shared.coordinator.prefilled(self._key)
                match event:
                    case Tokens():
                        chunk = works[number].named(event)
                        self._said.add(chunk)
                        yield chunk
                    case ContextReady():
                        self.handed_off = True
                        self.report.MergeFrom(event.report)
                        chunks = tuple(map(works[number].named, event.first_tokens))
                        for chunk in chunks:
                            self._said.add(chunk)
                        yield replace(event, first_tokens=chunks)
                    case Finished():
                        decoded += event.report.decode_tokens
                        self.report.MergeFrom(event.report)
                        running -= 1
                        if not running:
                            self.report.decode_tokens = decoded
                            yield event

    def _make_legs(self, work: Work, number: int, trace: TraceContext | None) -> Legs:
        """Legs of one of the parts that a try has; each is an attempt of its own for the instances."""
        job, shared = self._job, self._shared
        return Legs(
            shared.workers,
            RequestKey(self._key.request_id, self._key.attempt + number),
            self.placement,
            prompt=work.prompt,
            sampling=work.sampling,
            cache_salt=job.question.cache_salt,
            adapter=job.question.adapter,
            trace=trace,
            left=job.left,
            timeout_s=job.timeout_s,
            withdraw=shared.withdraw,
            schedules=shared.schedules,
            schedule=job.schedule,
        )

    async def _place_again(self, error: IsthmusError, span: Span) -> None:
        """Find another place after a failure. Raises `error` when there shall not be another try."""
        policy, why = self._shared.policy, error
        self._blame(error)
        self._key = RequestKey(self._key.request_id, self._key.attempt + max(1, len(self._legs)))
        while True:
            self.release()
            self.retries.append(why.message)
            self.retry_kinds.append(reason_word(why))
            if not worth_another(why) or len(self.retries) >= policy.max_attempts:
                raise error
            pause = policy.pause(len(self.retries), random.random())
            if pause >= self._job.left() or not self._shared.budget.take():
                raise error
            word = reason_word(why)
            span.event("retry", reason=word, message=why.message, attempt=self._key.attempt)
            self._shared.retried(word)
            logger.warning("request goes on elsewhere: %s", why.message, extra={"request_id": self._key.request_id})
            if pause:
                await self._shared.sleep(pause)
            try:
                return await self._route_again(span)
            except IsthmusError as refusal:
                why = refusal
                self._key = RequestKey(self._key.request_id, self._key.attempt + 1)

    async def _route_again(self, parent: Span) -> None:
        span = self._shared.tracing.begin("route", parent.context)
        span.set("isthmus.attempt", self._key.attempt)
        failed: str | None = "cancelled"
        try:
            await self.place(span.context)
            failed = None
            describe_placement(span, self.placement)
        except IsthmusError as error:
            failed = error.message
            raise
        finally:
            span.end(error=failed)

    def _blame(self, error: IsthmusError) -> None:
        """Remember which instance the next try had better avoid."""
        full = isinstance(error.detail, errors_pb2.Overloaded)
        broken = error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
        for legs in self._legs:
            failed = legs.failed
            if failed is None or not (full or broken):
                continue
            self._failed[failed.incarnation] = None
            if broken and self._shared.breakers.failed(failed.incarnation):
                logger.warning("instance gets no requests for a while", extra={"peer": failed.instance_id})
            return


def _instances(placement: Placement) -> Sequence[InstanceRef]:
    return (placement.generation,) if placement.context is None else (placement.context, placement.generation)
