"""A router's client of a coordinator, and what tests ask of the two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from coord_support import Running, instance, peer, until
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.coordinator_messages import Placement
from isthmus_router.ports import PlacementRequest


def key(number: int, attempt: int = 0) -> RequestKey:
    return RequestKey(MIN_GLOBAL_ID + number, attempt)


@asynccontextmanager
async def connected(
    target: str, name: str = "router", start_timeout_s: float = 20.0
) -> AsyncGenerator[CoordinatorClient, None]:
    client = CoordinatorClient(target, name, None, start_timeout_s)
    await client.start()
    try:
        yield client
        assert client.open_placements == 0
    finally:
        await client.close()


async def place(
    client: CoordinatorClient, number: int, attempt: int = 0, *, model: str = "m", timeout_s: float = 20.0
) -> Placement:
    return await client.select(PlacementRequest(key(number, attempt), model, 4, 4), timeout_s)


async def served(client: CoordinatorClient) -> None:
    await until(client.served)


async def load(target: str) -> dict[str, int]:
    async with peer(target) as one:
        cluster = await one.cluster()
    assert cluster.open_requests == max([0, *(member.open_requests for member in cluster.members)])
    return {member.instance.instance_id: member.open_requests for member in cluster.members}


async def until_load(target: str, wanted: dict[str, int]) -> None:
    async with asyncio.timeout(20):
        while await load(target) != wanted:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def member(running: Running, name: str = "w0") -> AsyncGenerator[None, None]:
    async with peer(running.target) as one:
        await one.register(instance(name))
        yield
