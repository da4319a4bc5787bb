"""Several streams read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) as they come, until all streams have ended.

    A stream whose item has not been taken is not read on. The first error ends all streams and is raised; closing this
    generator, or cancelling the task that reads it, ends all streams too.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    taken = [asyncio.Semaphore(0) for _ in streams]

    async def pump(number: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream) as items:
            async for item in items:
                queue.put_nowait((number, item))
                await taken[number].acquire()

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        running = len(tasks)
        while running:
            entry = await queue.get()
            if isinstance(entry, asyncio.Task):
                entry.result()
                running -= 1
                continue
            yield entry
            taken[entry[0]].release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
