"""Reading a request's body: bounded in size, time and structure before anything parses it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from isthmus_core.errors import DeadlineExceeded
from isthmus_router.http.errors import HttpError
from isthmus_router.structure import MAX_NODES, MAX_VALUES, count_structure, too_many, within_bounds


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body. Raises HttpError 413 for more than `max_bytes`, DeadlineExceeded when it is not there in time, and
    InvalidRequest when it holds too many values."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise DeadlineExceeded("sending the request body", timeout_s) from None
    whole = bytes(body)
    await _check_structure(whole)
    return whole


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body is larger than {max_bytes} bytes; send less", "body_too_large")


async def _check_structure(body: bytes) -> None:
    if within_bounds(body):
        return
    for values, nodes in count_structure(body):
        if values > MAX_VALUES or nodes > MAX_NODES:
            raise too_many("body")
        await asyncio.sleep(0)
