"""Items of a stream in bunches: what comes within a window after the last bunch goes out together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

# The stream is not read further ahead than this.
_MOST = 256


async def gathered(stream: AsyncGenerator[T, None], window_s: float) -> AsyncGenerator[list[T], None]:
    """Bunches of items in their order, none empty. The first item goes at once, and so does every one that comes more
    than `window_s` seconds after the last bunch. An error of the stream is raised behind what came before it; closing
    this generator closes the stream. With `window_s` 0 every item is a bunch."""
    if not window_s:
        async with aclosing(stream) as items:
            async for item in items:
                yield [item]
        return
    waiting: list[T] = []
    news, room = asyncio.Event(), asyncio.Semaphore(_MOST)

    async def read() -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    waiting.append(item)
                    news.set()
                    await room.acquire()
        finally:
            news.set()

    reading = asyncio.create_task(read())
    try:
        while True:
            await news.wait()
            news.clear()
            bunch, ended = waiting[:], reading.done()
            waiting.clear()
            if bunch:
                for _ in bunch:
                    room.release()
                yield bunch
            if ended:
                reading.result()
                return
            if bunch:
                # Ends early with the stream: nothing more can come to go out together.
                await asyncio.wait((reading,), timeout=window_s)
    finally:
        reading.cancel()
        await asyncio.wait((reading,))
