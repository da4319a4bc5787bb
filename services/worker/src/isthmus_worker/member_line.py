"""The stream between an instance and its coordinator, whichever of the two has opened it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
import grpc.aio
from isthmus.v1 import coordinator_service_pb2, member_service_pb2

Request = coordinator_service_pb2.RegisterRequest
Response = coordinator_service_pb2.RegisterResponse
Call = grpc.aio.StreamStreamCall[Request, Response]


class ProtocolError(Exception):
    """The coordinator said something that this build does not understand, or nothing any more."""


class Line(Protocol):
    """Both methods raise AioRpcError or ProtocolError when the stream has ended. One message at a time is written."""

    async def read(self) -> Response:
        """Next message of the coordinator."""
        ...

    async def write(self, message: Request) -> None:
        """Say something."""
        ...


class DialledLine:
    """A Register stream."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> Response:
        """See Line."""
        message = await self._call.read()
        if not isinstance(message, Response):
            raise await self._status()
        return message

    async def write(self, message: Request) -> None:
        """See Line."""
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:  # which is how grpc.aio says that the call has ended
            raise await self._status() from None

    async def _status(self) -> Exception:
        call = self._call
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            return ProtocolError("it ended the stream")
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        return grpc.aio.AioRpcError(code, initial, trailing, details)


class AcceptedLine:
    """An Enlist stream, which a coordinator has opened. How it ended is known to that one only."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._context = context

    async def read(self) -> Response:
        """See Line."""
        message: Any = await self._context.read()  # typed without EOF
        if not isinstance(message, member_service_pb2.EnlistRequest):
            raise ProtocolError("it ended the stream")
        return message.message

    async def write(self, message: Request) -> None:
        """See Line."""
        try:
            await self._context.write(member_service_pb2.EnlistResponse(message=message))
        except grpc.aio.BaseError:
            raise ProtocolError("it is gone") from None
