"""One request-response exchange: runs a pipeline's answer, whole or streamed, and cancels it when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from isthmus_core.errors import DeadlineExceeded, IsthmusError
from isthmus_router.http.answers import DONE, Choice, EventFrame, Shape, event, usage_of
from isthmus_router.http.errors import error_body, error_response
from isthmus_router.merge import merged
from isthmus_router.pipeline import Pipeline
from isthmus_router.requests import End, GenerateRequest, Part

logger = logging.getLogger(__name__)

_Parts = AsyncGenerator[tuple[int, Part | End], None]

# How long a client may take to read why its request failed.
LAST_WORD_S = 1.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold the stream back.
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """An ASGI response that generates. Nothing runs before it is called; the client's disconnect cancels it.

    `requests`: one for each prompt, with `n` answers each; choices are numbered prompt by prompt. `client_timeout_s`: a
    client that takes nothing of its answer for so long is dropped.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        requests: Sequence[GenerateRequest],
        shape: Shape,
        *,
        stream: bool,
        include_usage: bool,
        client_timeout_s: float,
    ) -> None:
        self._pipeline = pipeline
        self._requests = requests
        self._shape = shape
        self._stream = stream
        self._include_usage = include_usage
        self._client_timeout_s = client_timeout_s
        self._n = requests[0].sampling.n
        self._request_id = 0
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the exchange."""
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s = self._requests[0].timeout_s
        parts = merged([self._pipeline.generate(request) for request in self._requests])
        try:
            async with asyncio.timeout(timeout_s), aclosing(parts):
                if self._stream:
                    await self._send_stream(parts, send)
                else:
                    response = await self._whole(parts)
                    await self._patiently(response(scope, receive, send))
        except TimeoutError:
            await self._fail(DeadlineExceeded("the request", timeout_s), scope, receive, send)
        except IsthmusError as error:
            await self._fail(error, scope, receive, send)

    async def _patiently(self, sending: Awaitable[None]) -> None:
        """Sending waits for the client to read; the legs hold pages meanwhile."""
        try:
            async with asyncio.timeout(self._client_timeout_s):
                await sending
        except TimeoutError:
            raise DeadlineExceeded("reading the answer", self._client_timeout_s) from None

    async def _fail(self, error: IsthmusError, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A client that has stopped reading does not get to hold the exchange open any longer.
            async with asyncio.timeout(LAST_WORD_S):
                if not self._started:
                    await error_response(error, self._headers())(scope, receive, send)
                else:
                    # The status has gone out: the error is the stream's last event, and no [DONE] follows.
                    await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": False})
        except TimeoutError:
            logger.info("the client does not read: %s", error.message)

    async def _whole(self, parts: _Parts) -> JSONResponse:
        choices = [Choice(index) for index in range(len(self._requests) * self._n)]
        ends: list[End] = []
        async for number, part in parts:
            self._request_id = self._request_id or part.request_id
            if isinstance(part, End):
                ends.append(part)
            else:
                choices[number * self._n + part.index].add(part)
        return JSONResponse(self._shape.whole(self._request_id, choices, usage_of(ends)), headers=self._headers())

    async def _send_stream(self, parts: _Parts, send: Send) -> None:
        frames: dict[int, EventFrame] = {}
        ends: list[End] = []
        # The status waits for the first part, so that everything that goes wrong before has a status of its own.
        async for number, part in parts:
            self._request_id = self._request_id or part.request_id
            if isinstance(part, End):
                ends.append(part)
                continue
            piece = Choice(number * self._n + part.index)
            piece.add(part)
            await self._send(b"".join(self._events(piece, frames)), send)
        last = event(self._shape.usage(self._request_id, usage_of(ends))) if self._include_usage else b""
        await self._send(last + DONE, send, done=True)

    def _events(self, piece: Choice, frames: dict[int, EventFrame]) -> Iterator[bytes]:
        """Events of a new piece; `frames`: of the choices that have been opened."""
        frame = frames.get(piece.index)
        if frame is None:
            opening = self._shape.opening(self._request_id, piece.index)
            if opening is not None:
                yield event(opening)
            frame = frames[piece.index] = EventFrame(self._shape, self._request_id, piece.index)
        if piece.reason is not None or piece.logprobs:
            yield event(self._shape.piece(self._request_id, piece))
        elif text := "".join(piece.texts):
            yield frame.event(text)

    async def _send(self, body: bytes, send: Send, *, done: bool = False) -> None:
        if not self._started:
            self._started = True
            headers = [*_STREAM_HEADERS, *((name.encode(), value.encode()) for name, value in self._headers().items())]
            await self._patiently(send({"type": "http.response.start", "status": 200, "headers": headers}))
        if body:
            await self._patiently(send({"type": "http.response.body", "body": body, "more_body": not done}))

    def _headers(self) -> dict[str, str]:
        """The client's own name for the request, else the router's id when there is one."""
        name = self._requests[0].label or (str(self._request_id) if self._request_id else "")
        return {"x-request-id": name} if name else {}


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it, and wait for its end, as soon as the client is gone. The body must have been read."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.wait((worker, watcher))
    if not worker.cancelled():
        worker.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
