"""The Route stream as grpc.aio gives it, with one way of ending: AioRpcError with the status."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from isthmus_router.coordinator_messages import Request, Response

Call = grpc.aio.StreamStreamCall[Request, Response]


async def read(call: Call) -> Response:
    """Next message. Raises AioRpcError with the status when the stream has ended."""
    message = await call.read()
    if not isinstance(message, Response):
        raise await _status(call)
    return message


async def write(call: Call, message: Request) -> None:
    """Raises AioRpcError with the status when the stream has ended (grpc.aio says InvalidStateError then)."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        raise await _status(call) from None


async def _status(call: Call) -> grpc.aio.AioRpcError:
    code, details = await call.code(), await call.details()
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    if code is grpc.StatusCode.OK:
        code, details = grpc.StatusCode.UNAVAILABLE, "it ended the stream"
    return grpc.aio.AioRpcError(code, initial, trailing, details)
