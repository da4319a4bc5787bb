"""One request-response exchange: runs a pipeline's answer, whole or streamed, and cancels it when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from isthmus_core.errors import DeadlineExceeded, InternalError, IsthmusError
from isthmus_router.http.answers import DONE, Shape, event
from isthmus_router.http.errors import error_body, error_response
from isthmus_router.pipeline import Pipeline
from isthmus_router.requests import End, GenerateRequest, Part

logger = logging.getLogger(__name__)

# How long a client may take to read why its request failed.
LAST_WORD_S = 1.0
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold the stream back.
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """An ASGI response that generates. Nothing runs before it is called; the client's disconnect cancels it."""

    def __init__(
        self, pipeline: Pipeline, request: GenerateRequest, shape: Shape, *, stream: bool, include_usage: bool
    ) -> None:
        self._pipeline = pipeline
        self._request = request
        self._shape = shape
        self._stream = stream
        self._include_usage = include_usage
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the exchange."""
        await until_disconnect(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        timeout_s = self._request.timeout_s
        try:
            # Also bounds a client that does not read: sending waits for it, whatever the legs do.
            async with asyncio.timeout(timeout_s), aclosing(self._pipeline.generate(self._request)) as parts:
                if self._stream:
                    await self._send_stream(parts, send)
                else:
                    response = await self._whole(parts)
                    await response(scope, receive, send)
        except TimeoutError:
            await self._fail(DeadlineExceeded("the request", timeout_s), scope, receive, send)
        except IsthmusError as error:
            await self._fail(error, scope, receive, send)

    async def _fail(self, error: IsthmusError, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A client that has stopped reading does not get to hold the exchange open any longer.
            async with asyncio.timeout(LAST_WORD_S):
                if not self._started:
                    await error_response(error)(scope, receive, send)
                else:
                    # The status has gone out: the error is the stream's last event, and no [DONE] follows.
                    await send({"type": "http.response.body", "body": event(error_body(error)), "more_body": False})
        except TimeoutError:
            logger.info("the client does not read: %s", error.message)

    async def _whole(self, parts: AsyncGenerator[Part | End, None]) -> JSONResponse:
        text: list[str] = []
        async for part in parts:
            text.append(part.text)
            if isinstance(part, End):
                headers = {"x-request-id": str(part.request_id)}
                return JSONResponse(self._shape.whole(part.request_id, "".join(text), part), headers=headers)
        raise InternalError("the answer has no end")

    async def _send_stream(self, parts: AsyncGenerator[Part | End, None], send: Send) -> None:
        # The status waits for the first part, so that everything that goes wrong before has a status of its own.
        async for part in parts:
            chunks: list[dict[str, Any]] = []
            if not self._started:
                await self._open(part.request_id, send)
                chunks += self._shape.opening(part.request_id)
            if part.text:
                chunks.append(self._shape.piece(part.request_id, part.text))
            if isinstance(part, End):
                chunks += self._shape.closing(part.request_id, part, usage=self._include_usage)
            body = b"".join(event(chunk) for chunk in chunks)
            last = isinstance(part, End)
            if body or last:
                await send({"type": "http.response.body", "body": body + DONE if last else body, "more_body": not last})

    async def _open(self, request_id: int, send: Send) -> None:
        self._started = True
        headers = [*_STREAM_HEADERS, (b"x-request-id", str(request_id).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


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
