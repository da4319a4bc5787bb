"""A fleet of mock workers that comes, beats and changes under load: what the coordinator counts stays true.

The large one (nightly) has 1,000 workers and takes over five minutes:
    python -m pytest -m nightly tests/integration/test_membership_fleet.py
"""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from coord_support import Running, coordinator, until
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.policies import Policy
from isthmus_router.coordinator_client import CoordinatorClient
from mock_fleet import MockFleet, Truth, load

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _files() -> Iterator[None]:
    """Every worker has a connection of its own, both ends of it here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def rss() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def compare(cluster: Cluster, fleet: MockFleet, truth: Truth) -> None:
    """The coordinator knows who is there, what they have, and what is open on them."""
    names = {one.name for one in fleet.workers}
    await until(lambda: {view.instance.instance_id for view in cluster.members()} == names, 50)
    await until(lambda: not cluster.open_requests(), 50)
    assert not +truth.open
    cluster.check()
    by_name = {one.name: one for one in fleet.workers}

    def told() -> bool:
        return all(view.indexed_blocks == len(by_name[view.instance.instance_id].cached) for view in cluster.members())

    await until(told, 50)


async def run(running: Running, cluster: Cluster, *, size: int, seconds: float, churn: float, per_s: float) -> Truth:
    """A fleet's life, with two routers."""
    fleet, truth = MockFleet(running.target, size), Truth()
    routers = [CoordinatorClient(running.target, f"router-{at}") for at in range(2)]
    try:
        await fleet.start()
        for router in routers:
            await router.start()
        await until(lambda: any(served.name == "mock" for served in cluster.served()))
        gc.collect()
        loads = [load(router, truth, seconds, per_s / 2, seed=at + 1) for at, router in enumerate(routers)]
        churning = asyncio.create_task(fleet.churn(seconds, churn))
        await asyncio.gather(churning, fleet.beat(seconds, 1.0), *loads)
        assert churning.result() == int(seconds / 60 * churn * size)
        await compare(cluster, fleet, truth)
    finally:
        for router in routers:
            await router.close()
        await fleet.close()
    return truth


async def test_a_fleet_that_changes_under_load_leaves_no_trace():
    cluster = Cluster(Policy.KV_AWARE)
    async with coordinator(cluster=cluster) as running:
        truth = await run(running, cluster, size=60, seconds=6, churn=3.0, per_s=60)
    assert truth.asked > 100
    assert not truth.failed
    assert len(cluster.index) == 0
    assert cluster.members() == ()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_a_thousand_workers_for_five_minutes():
    cluster = Cluster(Policy.KV_AWARE)
    async with coordinator(cluster=cluster) as running:
        await run(running, cluster, size=1000, seconds=30, churn=0.1, per_s=100)  # the allocator's first growth
        await until(running.servicer.idle, 60)
        before = rss()
        truth = await run(running, cluster, size=1000, seconds=300, churn=0.1, per_s=200)
        assert not truth.failed
        await until(running.servicer.idle, 60)
        gc.collect()
        print(f"{truth.asked} requests, memory grew by {(rss() - before) / 2**20:.1f} MiB")
        assert rss() - before < 200 << 20
