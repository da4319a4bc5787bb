"""Running the two directions of a stream side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_one_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines until one of them ends, then cancel the others and wait for them. Raises the first exception
    among them, in the order given."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
