"""A worker that can never take the path it is required to take does not start, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_coordinator import FakeCoordinator
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
