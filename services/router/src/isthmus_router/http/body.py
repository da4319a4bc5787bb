"""Reading a request's body: bounded in size, time and structure before anything parses it.

A parser holds the interpreter while it works, and so every other stream of this router. What it costs depends on the
number of values, not on the number of bytes: text is cheap, a million little lists are not.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

from starlette.requests import Request

from isthmus_core.errors import DeadlineExceeded, InvalidRequest
from isthmus_router.http.errors import HttpError

# Some 25 ms of parsing each. Longer prompts of token ids fit into a gRPC message.
MAX_VALUES = 1 << 18
# Lists, objects, and names in objects: each costs as much as a dozen numbers.
MAX_NODES = 1 << 15
# Part of a body that is looked at without a break: well below a millisecond.
_SLICE = 1 << 16
_STRINGS_PER_SLICE = 256
_INSIDE = re.compile(rb'(?:[^"\\]+|\\.)*', re.DOTALL)
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


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
    # Counting everything is nearly free and an upper bound; text in strings makes it too high.
    if body.count(b",") <= MAX_VALUES and _nodes(body, 0, len(body)) <= MAX_NODES:
        return
    for values, nodes in count_structure(body):
        if values > MAX_VALUES or nodes > MAX_NODES:
            found = f"more than {MAX_VALUES} values or {MAX_NODES} lists, objects and names"
            raise InvalidRequest("body", found, "send fewer in one request")
        await asyncio.sleep(0)


def _nodes(body: bytes, begin: int, end: int) -> int:
    return sum(body.count(mark, begin, end) for mark in (b"[", b"{", b":"))


def count_structure(body: bytes) -> Iterator[tuple[int, int]]:
    """(commas; opening brackets and colons) outside of strings so far, slice after slice; the last is for all."""
    position = commas = nodes = 0
    in_string = False
    while position < len(body):
        limit = min(position + _SLICE, len(body))
        for _ in range(_STRINGS_PER_SLICE):
            if position >= limit:
                break
            if in_string:
                found = _INSIDE.match(body, position, limit)
                position = limit if found is None else found.end()
                if position < limit and body[position] == _QUOTE:
                    in_string = False
                    position += 1
                elif position < limit and body[position] == _BACKSLASH:
                    position += 2  # the slice ends between a backslash and what it escapes
                continue
            quote = body.find(b'"', position, limit)
            end = limit if quote < 0 else quote
            commas += body.count(b",", position, end)
            nodes += _nodes(body, position, end)
            in_string = quote >= 0
            position = end + in_string
        yield commas, nodes
