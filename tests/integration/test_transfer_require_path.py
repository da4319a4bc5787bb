"""A worker that can never take the path it is required to take does not start, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from isthmus.v1 import coordinator_service_pb2

from fake_coordinator import FakeCoordinator, Response
from rank_process import needs_nixl
from worker_process import worker

pytestmark = [pytest.mark.integration, needs_nixl]


@pytest.mark.parametrize("role", ["context", "generation"])
async def test_readiness_is_refused_with_both_values(tmp_path: Path, role: str):
    settings = (f"worker.role={role}", "transfer.require_path=cma")
    async with (
        FakeCoordinator() as coordinator,
        worker(tmp_path, coordinator.address, *settings, UCX_TLS="tcp,self") as one,
    ):
        assert await one.exit_code() == 3
        assert "transfer.require_path = cma" in one.log
        assert "nixl/ucx tcp" in one.log
        assert not coordinator.streams


async def test_a_real_pair_on_another_path_is_refused_with_both_values(tmp_path: Path):
    """Only the generation instance requires a path; the context instance can not take it, and measures that."""
    async with (
        FakeCoordinator() as near,
        FakeCoordinator() as far,
        worker(tmp_path, near.address, "worker.role=context", "worker.instance_id=c-0", UCX_TLS="tcp,self") as context,
        worker(tmp_path, far.address, "worker.role=generation", "transfer.require_path=cma") as generation,
    ):
        assert await context.serving(), context.log
        assert await generation.serving(), generation.log
        instance = near.said("hello")[0].instance
        far.send(Response(peers=coordinator_service_pb2.PeerSet(context_instances=[instance])))
        refused = coordinator_service_pb2.PAIR_STATE_INCOMPATIBLE
        await far.until(lambda: any(one.state == refused for one in far.said("pair")))
        (reason,) = next(one for one in far.said("pair") if one.state == refused).incompatibilities
        assert (reason.field, reason.mine) == ("transfer.require_path", "cma")
        assert "nixl/ucx tcp" in reason.yours
