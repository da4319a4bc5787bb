"""The legs of one request: context then generation, or one instance that does both.

Owns the one question of the hand-off that a router can answer: may the context instance still hold pages for a request
that nobody will fetch? Then it is told.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from isthmus_core.errors import DeadlineExceeded, RemoteError, WorkerLost
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext
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
    Tokens,
    Workers,
)


class Legs:
    """Runs the legs of one attempt.

    `left()`: seconds until the request's deadline, raises DeadlineExceeded when it has passed. `withdraw(placement,
    key)`: called once, without waiting, when the context instance may hold pages and the request is over.
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
        trace: TraceContext | None,
        left: Callable[[], float],
        timeout_s: float,
        withdraw: Callable[[Placement, RequestKey], None],
    ) -> None:
        self._workers = workers
        self._key = key
        self._placement = placement
        self._prompt = prompt
        self._sampling = sampling
        self._cache_salt = cache_salt
        self._trace = trace
        self._left = left
        self._timeout_s = timeout_s
        self._withdraw = withdraw
        self._held = False

    async def run(self) -> AsyncGenerator[LegEvent, None]:
        """Events of the legs; ends with Finished. Raises IsthmusError."""
        context = self._placement.context
        try:
            if context is None:
                legs = self._single(self._placement.generation)
            else:
                legs = self._split(context, self._placement.generation)
            async with aclosing(legs) as events:
                async for event in events:
                    yield event
        finally:
            if self._held:
                self._withdraw(self._placement, self._key)

    async def _single(self, instance: InstanceRef) -> AsyncGenerator[LegEvent, None]:
        async with aclosing(self._leg(instance, LegKind.BOTH, ("prefill", "decode"))) as events:
            async for event in events:
                yield event

    async def _split(self, context: InstanceRef, generation: InstanceRef) -> AsyncGenerator[LegEvent, None]:
        ready: ContextReady | None = None
        # From the moment the call is made: a cancel can cross the leg's ContextReady on the wire.
        self._held = True
        async with aclosing(self._leg(context, LegKind.CONTEXT, ("prefill", "prefill"))) as events:
            async for event in events:
                if isinstance(event, Finished):
                    self._held = False
                if isinstance(event, ContextReady):
                    ready = event
                yield event
        if ready is None:
            return
        async with aclosing(self._leg(generation, LegKind.GENERATION, ("hand-off", "decode"), ready)) as events:
            async for event in events:
                # Decoding needs the whole cache: the first token proves that the hand-off is over.
                self._held = False
                yield event

    async def _leg(
        self, instance: InstanceRef, kind: LegKind, phases: tuple[str, str], ready: ContextReady | None = None
    ) -> AsyncGenerator[LegEvent, None]:
        """One call. `phases`: what the instance is doing before and after its first token."""
        phase = phases[0]
        context_phase = None if ready is None else ready.params
        leg = Leg(self._key, kind, self._prompt, self._sampling, self._cache_salt, context_phase)
        call = self._workers.generate(instance, leg, timeout_s=self._left(), trace=self._trace)
        try:
            async with aclosing(call) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        phase = phases[1]
                    yield event
        except ConnectionLost as error:
            raise WorkerLost(instance.instance_id, phase, self._key) from error
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"request {self._key} ({phase})", self._timeout_s) from error
        except RemoteError:
            if kind is LegKind.CONTEXT:
                self._held = False  # the instance itself ended the leg
            raise
