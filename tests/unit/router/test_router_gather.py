"""Items that come close together go out together, and none is lost, late or out of order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from isthmus_router.http.gather import gathered


class Source:
    """A stream that a test feeds."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int | BaseException | None] = asyncio.Queue()
        self.closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed = True


async def test_without_a_window_every_item_is_a_bunch() -> None:
    source = Source()
    for item in (1, 2, 3, None):
        source.queue.put_nowait(item)
    assert [bunch async for bunch in gathered(source.items(), 0.0)] == [[1], [2], [3]]


async def test_the_first_goes_at_once_and_the_rest_of_the_window_together() -> None:
    source = Source()
    bunches = gathered(source.items(), 0.02)
    source.queue.put_nowait(1)
    assert await anext(bunches) == [1]
    for item in (2, 3, 4):
        source.queue.put_nowait(item)
    assert await anext(bunches) == [2, 3, 4]
    await bunches.aclose()
    assert source.closed


async def test_a_stream_that_ends_does_not_wait_for_the_window() -> None:
    source = Source()
    for item in (1, None):
        source.queue.put_nowait(item)
    async with asyncio.timeout(5):
        assert [bunch async for bunch in gathered(source.items(), 3600.0)] == [[1]]


async def test_an_error_comes_behind_what_came_before_it() -> None:
    source = Source()
    for item in (1, 2, ValueError("broken")):
        source.queue.put_nowait(item)
    seen: list[int] = []

    async def read() -> None:
        async for bunch in gathered(source.items(), 0.01):
            seen.extend(bunch)

    with pytest.raises(ValueError, match="broken"):
        await read()
    assert seen == [1, 2]


async def test_more_than_the_reader_may_run_ahead_comes_too() -> None:
    source = Source()
    for item in (*range(2000), None):
        source.queue.put_nowait(item)
    assert [item async for bunch in gathered(source.items(), 0.001) for item in bunch] == list(range(2000))
