"""Open requests of an engine and the stream of each one's events. No I/O: frames in, awaiting consumers out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Self

from isthmus_core.errors import DuplicateRequest, InternalError, IsthmusError, WorkerLost
from isthmus_core.generation import joined
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextReady, EngineOutput, EngineRequest, RequestType, Tokens, TookOver
from isthmus_worker.wire.engine_frames import LegEnded, LegReleased, LegTokens

# Longer messages save nothing, and joining them costs.
_MOST_TOGETHER = 64


class LegStream(AsyncIterator[EngineOutput]):
    """Events of one leg for one consumer: any number of `Tokens`, then one `ContextReady` or `Finished`, or it raises.
    Tokens that have not been read when others come are read with them.

    Closing it before its end cancels the leg.
    """

    def __init__(self, request: EngineRequest, on_close: Callable[[RequestKey], None]) -> None:
        self.request = request
        self.phase = "hand-off" if request.request_type is RequestType.GENERATION_ONLY else "prefill"
        self._on_close = on_close
        self._events: deque[EngineOutput | IsthmusError] = deque()
        self._arrived, self._ended = asyncio.Event(), asyncio.Event()
        self._over = False
        self._finished = False

    def put(self, event: EngineOutput | IsthmusError) -> None:
        """Append an event; nothing follows an end, an error or a close."""
        if self._over or self._finished:
            return
        if isinstance(event, Tokens):
            if self.request.request_type is not RequestType.CONTEXT_ONLY:
                self.phase = "decode"
        elif isinstance(event, TookOver):
            self.phase = "prefill"
        else:
            self._over = True
            if isinstance(event, ContextReady):
                self.phase = "hand-off"
        if not (isinstance(event, Tokens) and self._join(event)):
            self._events.append(event)
        self._arrived.set()
        if self._over:
            self._ended.set()

    def _join(self, tokens: Tokens) -> bool:
        """Let them go with those that wait to be read: a message costs as much as a hundred tokens in it."""
        last = self._events[-1] if self._events else None
        if not isinstance(last, Tokens) or len(last.ids) >= _MOST_TOGETHER:
            return False
        both = joined(last, tokens)
        if both is not None:
            self._events[-1] = both
        return both is not None

    async def gather(self, seconds: float) -> None:
        """Give tokens so much time to come together; less when the leg ends before."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineOutput:
        while not self._events:
            if self._finished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Tokens | TookOver):
            return event
        self._finished = True
        if isinstance(event, IsthmusError):
            raise event
        return event

    async def aclose(self) -> None:
        """Cancel the leg unless its end has been read. Never waits; safe to repeat."""
        if self._finished:
            return
        self._finished = True
        self._events.clear()
        self._arrived.set()
        self._ended.set()
        self._on_close(self.request.key)


class OpenLegs:
    """Every key that the engine holds something of: from `open` until its LegReleased."""

    def __init__(self, instance_id: str, on_close: Callable[[RequestKey], None]) -> None:
        self._instance_id = instance_id
        self._on_close = on_close
        self._open: dict[RequestKey, LegStream] = {}
        self._aborted: set[RequestKey] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: EngineRequest) -> LegStream:
        """A stream for a new leg. Raises DuplicateRequest while the key is live."""
        if request.key in self._open:
            raise DuplicateRequest(request.key.request_id)
        stream = LegStream(request, self._on_close)
        self._open[request.key] = stream
        self._empty.clear()
        return stream

    def mark_aborted(self, key: RequestKey) -> bool:
        """True when the engine must be told: the key is live and has not been aborted before."""
        if key not in self._open or key in self._aborted:
            return False
        self._aborted.add(key)
        return True

    def apply(self, event: LegTokens | LegEnded | LegReleased) -> None:
        """Hand an event of the engine to the stream it belongs to. Keys that are not open are ignored."""
        stream = self._open.get(event.key)
        if stream is None:
            return
        match event:
            case LegTokens(_, said):
                stream.put(said)
            case LegEnded(end=end):
                stream.put(end)
            case LegReleased(key):
                # The engine always ends a leg before it releases it; a consumer must not wait for ever if it did not.
                stream.put(InternalError(f"the engine released request {key} without ending it"))
                self._forget(key)

    def _forget(self, key: RequestKey) -> None:
        del self._open[key]
        self._aborted.discard(key)
        if not self._open:
            self._empty.set()

    def lose_all(self) -> None:
        """The engine is gone: every stream that has not ended raises WorkerLost, nothing is held any more."""
        for key, stream in list(self._open.items()):
            stream.put(WorkerLost(self._instance_id, stream.phase, key))
            self._forget(key)

    async def wait_empty(self) -> None:
        """Returns when nothing is held."""
        await self._empty.wait()
