"""Long-lived streams as grpc.aio gives them: the first message, reading and writing at once, ending with a status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc.aio

from isthmus_coordinator.outbox import Outbox
from isthmus_core.errors import DeadlineExceeded, InvalidRequest, IsthmusError
from isthmus_core.rpc import abort_with

# A peer that never reads can not be told why its stream ends.
_STATUS_S = 5.0
# What a write raises when the peer is gone: at a server, at a client (twice).
_GONE = (grpc.aio.BaseError, grpc.aio.AioRpcError, asyncio.InvalidStateError)


class Message(Protocol):
    """A message whose meaning is a oneof called body."""

    def WhichOneof(self, oneof_group: str, /) -> str | None: ...


Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response")


async def _read(context: grpc.aio.ServicerContext[Request, Response]) -> Request | None:
    """Next message; None when the peer has ended its side or is gone."""
    message: Any = await context.read()  # typed without EOF
    return None if message is grpc.aio.EOF else message


async def first_message(context: grpc.aio.ServicerContext[Request, Response], timeout_s: float) -> Request:
    """The first message, which must be Hello. Raises InvalidRequest or, after `timeout_s` seconds, DeadlineExceeded."""
    try:
        async with asyncio.timeout(timeout_s):
            message = await _read(context)
    except TimeoutError:
        raise DeadlineExceeded("waiting for Hello", timeout_s) from None
    body = None if message is None else message.WhichOneof("body")
    if message is None or body != "hello":
        raise unexpected(body, "send hello first")
    return message


def unexpected(body: str | None, remedy: str) -> InvalidRequest:
    """A message whose body is not for this place, empty, or of a kind this build does not know."""
    return InvalidRequest("body", body or "empty or unknown", remedy)


async def exchange(
    context: grpc.aio.ServicerContext[Request, Response], outbox: Outbox[Response], handle: Callable[[Request], None]
) -> None:
    """Give every message to `handle` and write what is in the outbox until the peer ends or is gone. Raises what
    `handle` raises and what the outbox is ended with."""
    # A status can follow a message that is still being written, but not metadata: send them first and alone.
    try:
        await context.send_initial_metadata(())
    except grpc.aio.BaseError:
        return  # the peer is gone already

    async def read() -> Request | None:
        return await _read(context)

    await pump(read, context.write, outbox, handle)


async def pump(
    read: Callable[[], Awaitable[Request | None]],
    write: Callable[[Response], Awaitable[None]],
    outbox: Outbox[Response],
    handle: Callable[[Request], None],
) -> None:
    """As `exchange`, over any stream. `read` returns None at its end."""
    ended = asyncio.create_task(outbox.ended())
    reader = asyncio.create_task(_read_all(read, handle))
    writer = asyncio.create_task(outbox.write_all(write))
    tasks: list[asyncio.Task[Any]] = [ended, reader, writer]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ended.result()
        if reader.done():
            reader.result()
        elif (error := writer.exception()) and not isinstance(error, _GONE):
            raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_all(read: Callable[[], Awaitable[Request | None]], handle: Callable[[Request], None]) -> None:
    while (message := await read()) is not None:
        handle(message)


async def end_with(context: grpc.aio.ServicerContext[Request, Response], error: IsthmusError) -> None:
    """End the stream with a status, within seconds. What the stream held must have been released before."""
    try:
        async with asyncio.timeout(_STATUS_S):
            await abort_with(context, error)
    except TimeoutError:
        context.set_code(error.code)
        context.set_details(error.message)
