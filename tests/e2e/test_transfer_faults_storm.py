"""A thousand requests whose clients leave in every phase: nothing stays held, no process grows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client
from isthmus_client.supervisor import LocalCluster
from mock_oracle import oracle

pytestmark = pytest.mark.timeout(180)

REQUESTS, AT_ONCE = 1000, 100
# Growth of all processes together that counts as growth: allocators keep some of what they had at their busiest.
MOST_GROWTH = 64 << 20


def resident(cluster: LocalCluster) -> int:
    """Bytes of memory of every process of the cluster."""
    roots = [psutil.Process(cluster.process(spec.name).pid) for spec in cluster.specs]
    return sum(one.memory_info().rss for root in roots for one in (root, *root.children(recursive=True)))


async def leave(client: Client, prompt: Sequence[int], patience_s: float) -> None:
    """Goes away after a while, whatever has come by then."""
    parts = client.generate(prompt, max_tokens=200, timeout_s=60)
    try:
        async with asyncio.timeout(patience_s):
            async for _ in parts:
                pass
    except TimeoutError:
        pass
    finally:
        await parts.aclose()


async def storm(client: Client, seed: int) -> None:
    draw, room = random.Random(seed), asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        prompt = [draw.randrange(32, 127) for _ in range(draw.randint(1, 600))]
        patience_s = draw.choice([0.001, 0.01, 0.05, 0.2, 0.5])
        async with room:
            await leave(client, prompt, patience_s)

    await asyncio.gather(*(one() for _ in range(REQUESTS)))


async def test_a_thousand_cancelled_requests_leave_nothing(tmp_path: Path):
    engine = {"mock": {"decode_us": 2000, "prefill_us_per_token": 50}}
    async with (
        running_cluster(replace(MOCK, base={"engine": engine}), tmp_path) as cluster,
        Client(cluster.grpc_endpoint) as client,
    ):
        # The first storm fills caches and allocators.
        await storm(client, 1)
        await assert_idle(cluster)
        before = resident(cluster)
        await storm(client, 2)
        await assert_idle(cluster)
        after = resident(cluster)
        assert after - before < MOST_GROWTH, f"{(after - before) >> 20} MiB more"
        answer = await client.answer([66] * 40, max_tokens=4)
        assert list(answer.token_ids) == oracle([66] * 40, 4)
