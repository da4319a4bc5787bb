"""What an instance has cached, told over one stream: everything when the coordinator asks, and what changes then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from isthmus_worker.engine import KvEvent
from isthmus_worker.member_line import Request
from isthmus_worker.wire.kv_events import events_to_pb

# Changes of the reusable blocks are collected for this long: a message costs the coordinator as much as 50 keys.
KV_INTERVAL_S = 0.02


class BlockReports:
    """`kv_events()` begins with everything there is; None when the engine reuses no blocks. `write` says something."""

    def __init__(
        self, kv_events: Callable[[], AsyncIterator[KvEvent]] | None, write: Callable[[Request], Awaitable[None]]
    ) -> None:
        self._kv_events, self._write = kv_events, write
        self._asked: asyncio.Queue[None] = asyncio.Queue()

    def ask(self) -> None:
        """The coordinator wants to hear everything."""
        self._asked.put_nowait(None)

    async def run(self) -> None:
        """Until it is cancelled, or raises what `write` raises."""
        await self._asked.get()
        while self._kv_events is not None:
            asked = asyncio.create_task(self._asked.get())
            following = asyncio.create_task(self._follow(self._kv_events()))
            try:
                await asyncio.wait([asked, following], return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    following.result()
                    break  # the engine is gone
            finally:
                asked.cancel()
                following.cancel()
                await asyncio.gather(asked, following, return_exceptions=True)
        await asyncio.Event().wait()  # for the stream's end

    async def _follow(self, events: AsyncIterator[KvEvent]) -> None:
        sequence = 1
        async for event in events:
            for message in events_to_pb(event, sequence):
                sequence = message.sequence + 1
                await self._write(Request(kv_events=message))
            await asyncio.sleep(KV_INTERVAL_S)
