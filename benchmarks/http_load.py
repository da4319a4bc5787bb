"""A load of streamed completions over plain sockets: cheap enough to leave the cores to what is measured."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Load:
    """One round. Times in seconds, of each request: until the first token's event, and in all."""

    rate: float
    first: Sequence[float]
    total: Sequence[float]
    events: int

    def first_ms(self, quantile: float) -> float:
        """Milliseconds until the first token."""
        return _quantile(self.first, quantile) * 1e3


def _quantile(values: Sequence[float], quantile: float) -> float:
    ordered = sorted(values)
    return (
        ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if quantile != 0.5 else statistics.median(ordered)
    )


class StreamClient:
    """One connection that is kept alive; raises RuntimeError for anything but a complete stream."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: bytes) -> tuple[float, float, int]:
        """Seconds until the first event with text, in all, and the number of events."""
        if self._writer is None or self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        began = time.perf_counter()
        self._writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await self._acked(self._reader.readline())
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r} {await self._reader.read(2000)!r}")
        await self._acked(self._reader.readuntil(b"\r\n\r\n"))
        first, events = 0.0, 0
        while size := int(await self._acked(self._reader.readline()), 16):
            piece = await self._reader.readexactly(size + 2)
            if not first:
                first = time.perf_counter() - began
            events += piece.count(b"data: {")
        await self._reader.readline()
        return first, time.perf_counter() - began, events

    async def _acked(self, reading: Coroutine[Any, Any, bytes]) -> bytes:
        """Without delayed acknowledgements: a server that leaves Nagle's algorithm on would wait 40 ms for each."""
        if self._writer is not None:
            self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return await reading

    def close(self) -> None:
        """End the connection."""
        if self._writer is not None:
            self._writer.close()


async def run_load(url: str, bodies: Sequence[dict[str, object]], concurrency: int) -> Load:
    """All bodies, `concurrency` at a time, each over one of as many connections."""
    waiting = [json.dumps(body).encode() for body in reversed(bodies)]
    rows: list[tuple[float, float, int]] = []

    async def work() -> None:
        client = StreamClient(url)
        try:
            while waiting:
                rows.append(await client.ask(waiting.pop()))
        finally:
            client.close()

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    took = time.perf_counter() - began
    return Load(len(rows) / took, [row[0] for row in rows], [row[1] for row in rows], sum(row[2] for row in rows))
