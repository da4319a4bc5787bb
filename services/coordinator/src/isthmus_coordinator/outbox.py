"""What a stream has still to be told: answers in order, and of each kind of state only the newest."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, NoReturn, TypeVar

from isthmus_core.errors import IsthmusError, Overloaded

T = TypeVar("T")


class Outbox(Generic[T]):
    """One stream's messages to be. Any number of producers that never wait, one writer task.

    A reader that is too slow for `limit` answers has its stream ended; states never pile up, so only answers count.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name, self._limit = name, limit
        self._answers: deque[T] = deque()
        self._states: dict[str, Callable[[], T]] = {}
        self._wake = asyncio.Event()
        self._ended: asyncio.Future[IsthmusError] = asyncio.get_running_loop().create_future()

    def post(self, answer: T) -> None:
        """Add an answer. With `limit` of them waiting the stream ends with Overloaded."""
        if len(self._answers) >= self._limit:
            self.end(Overloaded(self._name, self._limit))
            return
        self._answers.append(answer)
        self._wake.set()

    def put_state(self, kind: str, build: Callable[[], T]) -> None:
        """Replace what is to be told of one kind of state. `build` runs when it is about to be written."""
        self._states[kind] = build
        self._wake.set()

    def end(self, error: IsthmusError) -> None:
        """End the stream with this status, before anything that still waits. The first reason wins."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def ended(self) -> IsthmusError:
        """Wait until the stream is to end, and with which status."""
        return await asyncio.shield(self._ended)

    async def write_all(self, write: Callable[[T], Awaitable[None]]) -> NoReturn:
        """Write whatever there is, for ever; answers first."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._answers or self._states:
                if self._answers:
                    await write(self._answers.popleft())
                else:
                    await write(self._states.pop(next(iter(self._states)))())
