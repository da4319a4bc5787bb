"""Reading an event loop's own state from the thread that collects metrics."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# A loop that does not come round in this time shows its last known state.
_WAIT_S = 1.0


def read_on_loop(read: Callable[[], T], initial: T) -> Callable[[], T]:
    """`read` as a function for any thread: it is run between two callbacks of the current event loop, so that it may
    iterate over what the loop changes. `initial`: until it has been run once."""
    loop = asyncio.get_running_loop()
    last = initial

    async def on_loop() -> T:
        return read()

    def from_thread() -> T:
        nonlocal last
        if loop.is_closed():
            return last
        future = asyncio.run_coroutine_threadsafe(on_loop(), loop)
        try:
            last = future.result(_WAIT_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
        return last

    return from_thread
