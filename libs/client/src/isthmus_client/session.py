"""The life of a local cluster inside a command: signals, start, a body, an orderly stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from isthmus_client.supervisor import LocalCluster

Body = Callable[[LocalCluster, asyncio.Event], Awaitable[None]]


async def run_cluster(cluster: LocalCluster, body: Body, *, start_timeout_s: float) -> None:
    """Start the cluster, run `body`, stop the cluster, whatever happens.

    `body` gets an event that is set by the first SIGINT or SIGTERM and should return then; it is cancelled when a
    process can not be kept alive. A second signal kills everything at once. Raises what start or body raised.
    """
    stopping = asyncio.Event()
    main = asyncio.current_task()

    def on_signal() -> None:
        if stopping.is_set() and main is not None:
            main.cancel()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        if await _unless(stopping, cluster.start(start_timeout_s)):
            await _first_of(body(cluster, stopping), cluster.supervise(stopping))
    finally:
        await cluster.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _unless(stopping: asyncio.Event, work: Awaitable[None]) -> bool:
    """Await `work`; False when `stopping` came first (the work is cancelled then)."""
    task, stop = asyncio.ensure_future(work), asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return True
        return False
    finally:
        for future in (task, stop):
            future.cancel()
        await asyncio.gather(task, stop, return_exceptions=True)


async def _first_of(body: Awaitable[None], keeper: Awaitable[None]) -> None:
    """Until `body` returns, or `keeper` fails."""
    tasks = [asyncio.ensure_future(body), asyncio.ensure_future(keeper)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                await task
        await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
