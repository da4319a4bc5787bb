"""The exchange over one Connect stream, with the product's own outbox, envelopes and checks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from exchange import answer, request
from isthmus.v1 import kv_transfer_service_pb2 as pb
from isthmus.v1 import kv_transfer_service_pb2_grpc as rpc

from isthmus_core.rpc import RpcServer, open_channel
from kvtransfer.hub.outbox import Outbox
from kvtransfer.messages import KvRequest
from kvtransfer.session.actions import EndReason
from kvtransfer.wire import envelope_from_pb

INCARNATION = bytes(16)


class _Servicer(rpc.KvTransferServiceServicer):
    async def Connect(self, request_iterator: AsyncIterator[Any], context: object) -> AsyncIterator[Any]:
        outbox = Outbox()

        async def read() -> None:
            async for envelope in request_iterator:
                for body in envelope_from_pb(envelope).messages:
                    if isinstance(body, KvRequest):
                        for notice in answer(body):
                            outbox.say(notice, INCARNATION)
                await outbox.gets_its_turn()
            outbox.end(EndReason.UNNEEDED, "done")

        reader = asyncio.create_task(read())
        while await outbox.ready():
            response = pb.ConnectResponse(src_incarnation=INCARNATION)
            outbox.take(response)
            yield response
        await reader


def serve(ready: Connection) -> None:
    """Process main."""
    uvloop.run(_serve(ready))


async def _serve(ready: Connection) -> None:
    server = RpcServer()
    rpc.add_KvTransferServiceServicer_to_server(_Servicer(), server.server)
    await serve_until_closed(server, ready)


async def serve_until_closed(server: RpcServer, ready: Connection) -> None:
    """Tells the port, and serves until the other end of the pipe is closed."""
    ready.send(await server.start("127.0.0.1:0"))
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()

    def watch() -> None:
        try:
            ready.recv()
        except EOFError:
            loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=watch, daemon=True).start()
    await gone.wait()
    await server.stop(0)


class Peer:
    """The generation side of the stream."""

    def __init__(self, port: int) -> None:
        self._channel = open_channel(f"127.0.0.1:{port}")
        self._outbox = Outbox()
        self._call = rpc.KvTransferServiceStub(self._channel).Connect()
        self._heard = 0
        self._wanted = 0
        self._heard_at = 0.0
        self._enough = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        self._number = 0

    async def _read(self) -> None:
        async for envelope in self._call:
            self._heard += len(envelope_from_pb(envelope).messages)
            if self._heard >= self._wanted:
                self._heard_at = time.perf_counter()
                self._enough.set()

    async def _write(self) -> None:
        while await self._outbox.ready():
            envelope = pb.ConnectRequest(src_incarnation=INCARNATION)
            self._outbox.take(envelope)
            await self._call.write(envelope)
        await self._call.done_writing()

    def say(self, blocks: int, lists: int = 1) -> None:
        """Queues the next request."""
        self._number += 1
        self._outbox.say(request(self._number, blocks, lists), INCARNATION)

    async def heard(self, count: int) -> None:
        """Returns when `count` notices have come since the stream began."""
        self._wanted = count
        self._enough.clear()
        if self._heard < count:
            await self._enough.wait()

    async def round_trip(self, blocks: int, lists: int = 1, messages: int = 1) -> float:
        """Seconds from saying `messages` requests until every answer is here: where a hub goes on with it, in the task
        that reads."""
        begin, target = time.perf_counter(), self._heard + lists * messages
        for _ in range(messages):
            self.say(blocks, lists)
        await self.heard(target)
        return self._heard_at - begin

    async def rate(self, blocks: int, window: int, total: int) -> float:
        """Requests per second with at most `window` of them unanswered."""
        begin, base = time.perf_counter(), self._heard
        said = 0
        while said < total:
            room = min(window - (said - (self._heard - base)), total - said)
            for _ in range(room):
                self.say(blocks)
            said += room
            await self.heard(base + said - window + 1)
        await self.heard(base + total)
        return total / (time.perf_counter() - begin)

    async def close(self) -> None:
        """Ends the stream."""
        self._outbox.end(EndReason.UNNEEDED, "done")
        await asyncio.gather(*self._tasks)
        await self._channel.close()
