"""A grpc.aio stream that carries bytes and nothing else: what is left of the exchange when our own part is free."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import uvloop
from exchange_grpc import serve_until_closed

from isthmus_core.rpc import RpcServer, open_channel

# As large as a KvRequest of 200 bytes and its envelope.
BODY = bytes(256)


def _same(data: bytes) -> bytes:
    return data


async def _echo(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


def serve(ready: Connection) -> None:
    """Process main."""
    uvloop.run(_serve(ready))


async def _serve(ready: Connection) -> None:
    server = RpcServer()
    echo: Any = grpc.stream_stream_rpc_method_handler(_echo, _same, _same)  # pyright: ignore[reportArgumentType]
    server.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("empty", {"Echo": echo}),))
    await serve_until_closed(server, ready)


class Peer:
    """The client's end."""

    def __init__(self, port: int) -> None:
        self._channel = open_channel(f"127.0.0.1:{port}")
        call: Any = self._channel.stream_stream("/empty/Echo", _same, _same)
        self._call = call()

    async def round_trip(self, _: int) -> float:
        """Seconds there and back."""
        begin = time.perf_counter()
        await self._call.write(BODY)
        await self._call.read()
        return time.perf_counter() - begin

    async def close(self) -> None:
        """Ends the stream."""
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass
        await self._channel.close()
