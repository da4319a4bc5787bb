"""A rank that fails takes its instance down, with one line that says which rank and why; never a hang."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from fake_coordinator import FakeCoordinator
from tiny_models import tiny_llama
from worker_process import WorkerProcess, leg, worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
PROMPT = [4 + index * 7 % 300 for index in range(40)]


@pytest.fixture(scope="module", name="llama")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@asynccontextmanager
async def split(folder: Path, model: Path, *settings: str) -> AsyncGenerator[WorkerProcess, None]:
    """An instance of two ranks that does both legs; it may still be starting."""
    async with (
        FakeCoordinator() as coordinator,
        worker(
            folder,
            coordinator.address,
            "engine.kind=torch",
            f"model.path={model}",
            "parallel.tensor_parallel_size=2",
            *settings,
        ) as one,
    ):
        yield one


def ranks(one: WorkerProcess) -> list[psutil.Process]:
    """By rank."""
    found = psutil.Process(one.process.pid).children()
    return sorted(found, key=lambda child: "--rank" in child.cmdline())


def said(one: WorkerProcess) -> str:
    """Its last line."""
    return one.log.strip().splitlines()[-1]


async def ended(one: WorkerProcess, family: list[psutil.Process]) -> None:
    """The hub has left with an error, and every process of the instance with it."""
    assert await asyncio.wait_for(one.exit_code(), 30)
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


async def lose(one: WorkerProcess, rank: psutil.Process, number: signal.Signals) -> None:
    """Reads a long answer to its end; the rank gets the signal after the first token."""
    running = True
    async for _ in one.stub.Generate(leg(PROMPT, 2000), timeout=60):
        if running:
            rank.send_signal(number)
        running = False


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.nightly)])
async def test_a_rank_killed_while_idle(tmp_path: Path, llama: Path, rank: int):
    async with split(tmp_path, llama) as one:
        assert await one.serving(), one.log
        family = ranks(one)
        family[rank].kill()
        await ended(one, family)
        assert f"engine process {family[rank].pid} (rank {rank}) was killed by SIGKILL" in said(one)


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.nightly),
    ],
)
async def test_a_rank_lost_in_the_middle_of_a_step(tmp_path: Path, llama: Path, rank: int, number: signal.Signals):
    async with split(tmp_path, llama, "parallel.step_timeout_s=4") as one:
        assert await one.serving(), one.log
        family = ranks(one)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await lose(one, family[rank], number)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "was lost during decode" in (failed.value.details() or "")
        await ended(one, family)
        reason = f"(rank {rank}) was killed" if number is signal.SIGKILL else "another rank of this instance is gone"
        assert reason in said(one)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("parallel.tensor_parallel_size=5",), "the model has 4 attention heads, use at most 4"),
        (("parallel.devices=[cpu, 'cuda:7']",), "torch sees 0 CUDA devices"),
        (("engine.num_blocks=null", "engine.kv_cache_bytes=65536", "engine.tokens_per_block=1024"), "kv_cache_bytes"),
    ],
)
async def test_an_instance_that_can_not_start_says_why_once(
    tmp_path: Path, llama: Path, settings: tuple[str, ...], says: str
):
    async with split(tmp_path, llama, *settings) as one:
        assert await asyncio.wait_for(one.exit_code(), 60) in (2, 3)
        assert says in said(one)
