"""A coordinator that takes every instance in and remembers what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_core.rpc import RpcServer

Request = coordinator_service_pb2.RegisterRequest
Response = coordinator_service_pb2.RegisterResponse


class FakeCoordinator(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    """Use as an async context manager; `address` is host:port. `streams[i]` lists the messages of the i-th stream."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._host = host
        self.streams: list[list[Request]] = []
        self.open_streams = 0
        self.refuse: grpc.StatusCode | None = None
        self.mute = False
        self.welcome = coordinator_service_pb2.RegisterWelcome(schema_version=2)
        self._port = port
        self._server: RpcServer | None = None
        self._outboxes: list[asyncio.Queue[Response | grpc.StatusCode | None]] = []
        self._changed = asyncio.Event()

    async def __aenter__(self) -> FakeCoordinator:
        self._server = RpcServer()
        coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, self._server.server)
        self._port = await self._server.start(f"{self._host}:{self._port}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(0)

    @property
    def port(self) -> int:
        return self._port

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    async def Register(self, request_iterator: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        heard: list[Request] = []
        outbox: asyncio.Queue[Response | grpc.StatusCode | None] = asyncio.Queue()
        self.streams.append(heard)
        self._outboxes.append(outbox)
        if self.refuse is not None:
            await context.abort(self.refuse, "not you")
        self.open_streams += 1

        async def listen() -> None:
            try:
                async for message in request_iterator:
                    heard.append(message)
                    self._changed.set()
            finally:
                outbox.put_nowait(None)
                self._changed.set()

        listening = asyncio.create_task(listen())
        try:
            if not self.mute:
                # As the real one: Welcome answers Hello. Who has it may look at what was said.
                await self.until(lambda: bool(heard) or not outbox.empty())
                yield Response(welcome=self.welcome)
            while (message := await outbox.get()) is not None:
                if isinstance(message, grpc.StatusCode):
                    await context.abort(message, "replaced by another incarnation")
                    return
                yield message
        finally:
            self.open_streams -= 1
            self._changed.set()
            listening.cancel()

    def send(self, message: Response | grpc.StatusCode | None) -> None:
        """To the newest stream: a message, an end with a status, or an end."""
        self._outboxes[-1].put_nowait(message)

    def said(self, kind: str, stream: int = -1) -> list[Any]:
        """Bodies of one kind, in order."""
        if not self.streams:
            return []
        return [getattr(message, kind) for message in self.streams[stream] if message.WhichOneof("body") == kind]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a message changes."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()
