"""A fleet of mock workers that comes, beats and changes under load: what the coordinator counts stays true.

The large one (nightly) has 1,000 workers in two processes, the coordinator in a third, and takes seven minutes:
    python -m pytest -s -m nightly tests/integration/test_membership_fleet.py
"""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import coordinator_service_pb2_grpc

from coord_support import Running, coordinator, until
from fleet_process import FleetProcess, coordinator_process, fleet_process
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.policies import Policy
from isthmus_core.process import free_port
from isthmus_core.rpc import open_channel, wait_serving
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


async def members(target: str) -> list[pb.ClusterMember]:
    """As the coordinator tells them."""
    async with open_channel(target) as channel:
        stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
        state = await stub.GetCluster(pb.GetClusterRequest(without_pairs=True), timeout=30)
    assert state.open_requests == sum(member.open_requests for member in state.members) // 2  # each has two legs
    return list(state.members)


async def agree(target: str, fleets: Sequence[FleetProcess], timeout_s: float) -> int:
    """Wait until the coordinator's members, their loads, blocks and open requests are the workers' truth and 0."""
    async with asyncio.timeout(timeout_s):
        while True:
            told = [await fleet.do("tell") for fleet in fleets]
            truth = {name: [*state, 0] for one in told for name, state in one.items()}
            known = {
                one.instance.instance_id: [
                    one.indexed_blocks,
                    one.load.running_requests,
                    one.load.used_blocks,
                    one.open_requests,
                ]
                for one in await members(target)
            }
            if known == truth:
                return len(known)
            await asyncio.sleep(0.5)


async def live(
    target: str, fleets: Sequence[FleetProcess], seconds: float, *, churn: float, beat_s: float, per_s: float, seed: int
) -> tuple[Truth, int]:
    """Beats, churn and requests of two routers; what was asked, and how many workers were replaced."""
    truth, routers = Truth(), [CoordinatorClient(target, f"router-{seed}-{at}") for at in range(2)]
    try:
        for router in routers:
            await router.start()
        await until(lambda: all(router.served() for router in routers))
        lives = [fleet.do("live", seconds=seconds, churn=churn, beat_s=beat_s) for fleet in fleets]
        loads = [load(router, truth, seconds, per_s / 2, seed=2 * seed + at) for at, router in enumerate(routers)]
        replaced = asyncio.gather(*lives)
        await asyncio.gather(replaced, *loads)
        return truth, sum(replaced.result())
    finally:
        for router in routers:
            await router.close()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_a_thousand_workers_for_five_minutes(tmp_path: Path):
    size, log = 1000, tmp_path / "processes.log"
    target = f"127.0.0.1:{free_port()}"
    async with (
        coordinator_process(target, log) as pid,
        fleet_process(target, size // 2, 1, size, log) as one,
        fleet_process(target, size // 2, 2, size, log) as other,
    ):
        assert await wait_serving(target, 60)
        coordinator, fleets = psutil.Process(pid), (one, other)
        await asyncio.gather(*(fleet.do("start") for fleet in fleets))
        settings = {"churn": 0.1, "beat_s": 2.0}
        truth, _ = await live(target, fleets, 30, **settings, per_s=50, seed=1)  # the allocator's first growth
        assert not truth.failed, truth.failed
        assert await agree(target, fleets, 120) == size
        before, busy = coordinator.memory_info().rss, coordinator.cpu_times().user
        truth, replaced = await live(target, fleets, 300, **settings, per_s=100, seed=2)
        assert not truth.failed, truth.failed
        assert not +truth.open
        assert replaced == 500
        assert await agree(target, fleets, 120) == size
        grown, busy = coordinator.memory_info().rss - before, coordinator.cpu_times().user - busy
        print(
            f"{truth.asked} requests, {replaced} workers replaced; the coordinator took {busy / 3:.0f} % of a core, "
            f"its memory grew by {grown / 2**20:.1f} MiB"
        )
        assert grown < 64 << 20
        await asyncio.gather(*(fleet.do("leave") for fleet in fleets))
        assert await agree(target, (), 60) == 0
    print(log.read_text())
