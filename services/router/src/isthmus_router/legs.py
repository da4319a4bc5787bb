"""The legs of one request: context then generation, both at once, or one instance that does both.

Owns the one question of the hand-off that a router can answer: may the context instance still hold pages for a request
that nobody will fetch? Then it is told.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from isthmus.v1.generation_pb2 import ContextPhaseParams

from isthmus_core.errors import DeadlineExceeded, RemoteError, WorkerLost
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext
from isthmus_router.merge import merged
from isthmus_router.ports import (
    ConnectionLost,
    ContextReady,
    Finished,
    InstanceRef,
    Leg,
    LegEvent,
    LegKind,
    Placement,
    Sampling,
    Schedule,
    Tokens,
    TookOver,
    Workers,
)
from isthmus_router.schedules import Schedules, is_refusal
from isthmus_router.taking_over import TakingOver


class Legs:
    """Runs the legs of one attempt.

    `left()`: seconds until the request's deadline, raises DeadlineExceeded when it has passed. `withdraw(placement,
    key)`: called without waiting when the context instance may work or hold pages for nobody. `schedule`: what is
    wanted; `schedules` knows which pairs can not do it.
    """

    def __init__(
        self,
        workers: Workers,
        key: RequestKey,
        placement: Placement,
        *,
        prompt: bytes,
        sampling: Sampling,
        cache_salt: bytes,
        adapter: str,
        trace: TraceContext | None,
        left: Callable[[], float],
        timeout_s: float,
        withdraw: Callable[[Placement, RequestKey], None],
        schedules: Schedules,
        schedule: Schedule,
    ) -> None:
        self._workers = workers
        self._key = key
        self._placement = placement
        self._prompt = prompt
        self._sampling = sampling
        self._cache_salt, self._adapter = cache_salt, adapter
        self._trace = trace
        self._left = left
        self._timeout_s = timeout_s
        self._withdraw = withdraw
        self._held = False
        self._schedules = schedules
        # None when one instance does everything.
        self.schedule = schedules.of(placement, schedule)
        # The instance whose call failed, once one has.
        self.failed: InstanceRef | None = None
        self._over = TakingOver(key)

    async def run(self) -> AsyncGenerator[LegEvent, None]:
        """Events of the legs; ends with Finished. Raises IsthmusError."""
        context = self._placement.context
        try:
            if context is None:
                legs = self._single(self._placement.generation)
            elif self.schedule is Schedule.GENERATION_FIRST:
                legs = self._at_once(context, self._placement.generation)
            else:
                legs = self._split(context, self._placement.generation)
            async with aclosing(legs) as events:
                async for event in events:
                    yield event
        finally:
            if self._held:
                self._withdraw(self._placement, self._key)

    async def _single(self, instance: InstanceRef) -> AsyncGenerator[LegEvent, None]:
        async with aclosing(self._leg(instance, self._make(LegKind.BOTH), ("prefill", "decode"))) as events:
            async for event in events:
                yield event

    async def _split(self, context: InstanceRef, generation: InstanceRef) -> AsyncGenerator[LegEvent, None]:
        ready: ContextReady | None = None
        async with aclosing(self._context_leg(context, generation_waits=False)) as events:
            async for event in events:
                if isinstance(event, ContextReady):
                    ready = event
                yield event
        if ready is None:
            return
        async with aclosing(self._generation_leg(generation, ready)) as events:
            async for event in events:
                yield event

    async def _at_once(self, context: InstanceRef, generation: InstanceRef) -> AsyncGenerator[LegEvent, None]:
        """Both legs run at the same time; an error of either one ends both, unless the generation leg takes over. The
        first tokens come from the context leg: what the generation leg says before they are here has to wait."""
        ready: ContextReady | None = None
        early: list[LegEvent] = []
        context_leg = self._over.guarded(self._context_leg(context, generation_waits=True))
        async with aclosing(merged((context_leg, self._waiting_leg(context, generation)))) as events:
            async for number, event in events:
                if self._over.taken:
                    rest = self._over.unsaid(event) if number == 1 else None
                    if rest is not None:
                        yield rest
                    continue
                if number == 1 and ready is None:
                    early.append(event)
                    continue
                yield event
                if isinstance(event, ContextReady):
                    ready = event
                    self._over.told(ready.first_tokens, context.instance_id)
                    for waited in early:
                        yield waited
                elif isinstance(event, Finished):
                    # Of the context leg: the first tokens were the last ones, and leaving ends the other leg.
                    return
        if ready is not None and self.schedule is Schedule.CONTEXT_FIRST:
            async with aclosing(self._generation_leg(generation, ready)) as events:
                async for event in events:
                    yield event

    async def _context_leg(self, context: InstanceRef, *, generation_waits: bool) -> AsyncGenerator[LegEvent, None]:
        # From the moment the call is made: a cancel can cross the leg's ContextReady on the wire.
        self._held = True
        leg = self._make(LegKind.CONTEXT, generation_waits=generation_waits)
        async with aclosing(self._leg(context, leg, ("prefill", "prefill"))) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self._held = False
                yield event

    async def _generation_leg(self, generation: InstanceRef, ready: ContextReady) -> AsyncGenerator[LegEvent, None]:
        leg = self._make(LegKind.GENERATION, context_phase=ready.params)
        async with aclosing(self._leg(generation, leg, ("hand-off", "decode"))) as events:
            async for event in events:
                # Decoding needs the whole cache: the first token proves that the hand-off is over.
                self._held = False
                yield event

    async def _waiting_leg(self, context: InstanceRef, generation: InstanceRef) -> AsyncGenerator[LegEvent, None]:
        """A generation leg that waits for its context leg. When this pair does not know how, it ends without an event
        and the request goes on as context_first."""
        leg = self._make(LegKind.GENERATION, context=context)
        try:
            async with aclosing(self._leg(generation, leg, ("hand-off", "decode"))) as events:
                async for event in events:
                    self._held &= not isinstance(event, Tokens)
                    yield event
        except RemoteError as error:
            if not is_refusal(error):
                if self._over.lost is not None:
                    raise self._over.lost from error
                raise
            self.schedule = Schedule.CONTEXT_FIRST
            self._schedules.refused(self._placement, error.message)

    def _take_over(self) -> None:
        """The context leg, if it still runs, works for nobody."""
        self._over.begin()
        self.failed = None
        if self._held:
            self._withdraw(self._placement, self._key)

    def _make(
        self,
        kind: LegKind,
        *,
        context_phase: ContextPhaseParams | None = None,
        context: InstanceRef | None = None,
        generation_waits: bool = False,
    ) -> Leg:
        same = (self._prompt, self._sampling, self._cache_salt, self._adapter)
        return Leg(self._key, kind, *same, context_phase, context, generation_waits)

    async def _leg(self, instance: InstanceRef, leg: Leg, phases: tuple[str, str]) -> AsyncGenerator[LegEvent, None]:
        """One call. `phases`: what the instance is doing before and after its first token."""
        phase = phases[0]
        call = self._workers.generate(instance, leg, timeout_s=self._left(), trace=self._trace)
        try:
            async with aclosing(call) as events:
                async for event in events:
                    if isinstance(event, TookOver):
                        phase = "prefill"
                        self._take_over()
                        continue
                    if isinstance(event, Tokens):
                        phase = phases[1]
                    yield event
        except ConnectionLost as error:
            self._blame(instance, leg)
            raise WorkerLost(instance.instance_id, phase, self._key) from error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"request {self._key} ({phase})", self._timeout_s) from error
        except RemoteError:
            self._blame(instance, leg)
            if leg.kind is LegKind.CONTEXT:
                self._held = False  # the instance itself ended the leg
            raise

    def _blame(self, instance: InstanceRef, leg: Leg) -> None:
        if leg.kind is not LegKind.CONTEXT or not self._over.taken:
            self.failed = self.failed or instance
