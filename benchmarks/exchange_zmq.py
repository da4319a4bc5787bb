"""The same exchange over ZeroMQ: ROUTER bound by the context side, DEALER on the generation side, msgpack maps.

Both ends blocked in recv, as today's systems have it (a thread of its own on each side), or both inside asyncio with
uvloop, as a service needs it.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import numpy as np
import uvloop
import zmq
import zmq.asyncio
from exchange import answer, request

from isthmus_core.keys import RequestKey
from kvtransfer.messages import KvRequest
from kvtransfer.ports import Extent, RankBlocks, TokenRange, TransferNotice, TransferStats, WriterOutcome


def pack_request(asked: KvRequest) -> bytes:
    """A request as a map."""
    lists = [{"rank": one.rank, "group": one.layer_group, "blocks": one.blocks.tobytes()} for one in asked.destinations]
    return msgpack.packb(
        {
            "type": "request",
            "request_id": asked.key.request_id,
            "attempt": asked.key.attempt,
            "receive": asked.receive,
            "tokens": [asked.tokens.begin, asked.tokens.end],
            "lists": lists,
        }
    )


def unpack_request(data: bytes) -> KvRequest:
    """The request in a map."""
    found: dict[str, Any] = msgpack.unpackb(data)
    return KvRequest(
        RequestKey(found["request_id"], found["attempt"]),
        TokenRange(*found["tokens"]),
        tuple(RankBlocks(one["rank"], one["group"], np.frombuffer(one["blocks"], np.int32)) for one in found["lists"]),
        receive=found["receive"],
    )


def pack_notice(notice: TransferNotice) -> bytes:
    """A notice as a map."""
    stats = notice.stats
    return msgpack.packb(
        {
            "type": "notice",
            "request_id": notice.key.request_id,
            "attempt": notice.key.attempt,
            "receive": notice.receive,
            "src": notice.src_rank,
            "dst": notice.dst_rank,
            "outcome": notice.outcome.value,
            "extents": [
                [one.layer_group, one.view, one.tokens.begin, one.tokens.end, one.layer_begin, one.layer_end]
                for one in notice.extents
            ],
            "stats": [stats.bytes, stats.descriptors, stats.path, stats.queue, stats.plan, stats.post, stats.wire],
        }
    )


def unpack_notice(data: bytes) -> TransferNotice:
    """The notice in a map."""
    found: dict[str, Any] = msgpack.unpackb(data)
    extents = tuple(Extent(one[0], one[1], TokenRange(one[2], one[3]), one[4], one[5]) for one in found["extents"])
    return TransferNotice(
        RequestKey(found["request_id"], found["attempt"]),
        found["src"],
        found["dst"],
        WriterOutcome(found["outcome"]),
        extents,
        stats=TransferStats(*found["stats"]),
        receive=found["receive"],
    )


def serve(ready: Connection) -> None:
    """Process main."""
    socket = zmq.Context().socket(zmq.ROUTER)
    ready.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(ready.fileno(), zmq.POLLIN)
    while True:
        heard = dict(poller.poll())
        if ready.fileno() in heard:
            return
        identity, data = socket.recv_multipart()
        for notice in answer(unpack_request(data)):
            socket.send_multipart([identity, pack_notice(notice)])


def serve_asyncio(ready: Connection) -> None:
    """Process main, inside an event loop."""
    uvloop.run(_serve(ready))


async def _serve(ready: Connection) -> None:
    socket = zmq.asyncio.Context().socket(zmq.ROUTER)
    ready.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(ready.fileno(), gone.set)

    async def answer_all() -> None:
        while True:
            identity, data = await socket.recv_multipart()
            for notice in answer(unpack_request(data)):
                await socket.send_multipart([identity, pack_notice(notice)])

    answering = asyncio.create_task(answer_all())
    await gone.wait()
    answering.cancel()


class BlockingPeer:
    """The generation side, blocked in recv."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._number = 0

    def say(self, blocks: int) -> None:
        """Sends the next request."""
        self._number += 1
        self._socket.send(pack_request(request(self._number, blocks)))

    def round_trip(self, blocks: int, messages: int = 1) -> float:
        """Seconds from sending `messages` requests until every answer is here."""
        begin = time.perf_counter()
        for _ in range(messages):
            self.say(blocks)
        for _ in range(messages):
            unpack_notice(self._socket.recv())
        return time.perf_counter() - begin

    def rate(self, blocks: int, window: int, total: int) -> float:
        """Requests per second with at most `window` of them unanswered."""
        begin = time.perf_counter()
        for number in range(total + window):
            if number >= window:
                unpack_notice(self._socket.recv())
            if number < total:
                self.say(blocks)
        return total / (time.perf_counter() - begin)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(0)


class AsyncPeer:
    """The generation side inside an event loop."""

    def __init__(self, port: int) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.connect(f"tcp://127.0.0.1:{port}")
        self._number = 0

    async def say(self, blocks: int) -> None:
        """Sends the next request."""
        self._number += 1
        await self._socket.send(pack_request(request(self._number, blocks)))

    async def round_trip(self, blocks: int, messages: int = 1) -> float:
        """As `BlockingPeer.round_trip`."""
        begin = time.perf_counter()
        for _ in range(messages):
            await self.say(blocks)
        for _ in range(messages):
            unpack_notice(await self._socket.recv())
        return time.perf_counter() - begin

    async def rate(self, blocks: int, window: int, total: int) -> float:
        """As `BlockingPeer.rate`."""
        begin = time.perf_counter()
        for number in range(total + window):
            if number >= window:
                unpack_notice(await self._socket.recv())
            if number < total:
                await self.say(blocks)
        return total / (time.perf_counter() - begin)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close(0)
