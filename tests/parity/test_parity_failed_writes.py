"""Ranks that disagree because the agent of one of them has failed: two ranks write to two, all of them alive.

Rank 0 has delivered its half of every cache, rank 1 has not. No rank may decode what another one has not got, whatever
follows: one more try, the prompt computed on the generation side, or an error. Nothing is held afterwards.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio
from isthmus.v1 import errors_pb2

from faulty_agent import Faults
from isthmus_core.errors import RemoteError, from_rpc_error
from parity_fleet import Fleet, Instance, Shape, fetch, prefill, run_split
from parity_models import VOCAB
from parity_oracle import cases, expected

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]
# A prompt for each test: what an earlier one has left in the pages must not be right by chance.
CASES = [cases(VOCAB, (140,), draw=200 + number)[0] for number in range(9)]
FAULTS = ["half", "refuse"]


class World(NamedTuple):
    """One context instance, and a generation instance for each policy."""

    faults: Faults
    context: Instance
    failing: Instance
    computing: Instance

    async def idle(self) -> None:
        """Every fault has happened and no page is held."""
        assert not self.faults.left
        for one in (self.context, self.failing, self.computing):
            if one.process.process.returncode is None:
                await one.process.idle()


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="world")
async def _world(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> AsyncGenerator[World, None]:
    faults = Faults(tmp_path_factory.mktemp("faults"))
    settings = ("transfer.backend=faulty", "transfer.in_doubt_s=300", "transfer.timeout_s=20")
    context, failing = Shape(llama, tp=2, settings=settings), Shape(llama, tp=2, settings=settings)
    computing = Shape(llama, tp=2, settings=(*settings, "transfer.on_transfer_failure=recompute"))
    async with Fleet(tmp_path_factory.mktemp("failed"), environment=faults.environment) as fleet:
        first, second = await fleet.pair(context, failing)
        yield World(faults, first, second, (await fleet.pair(context, computing))[1])


@pytest.fixture(scope="module", name="right")
def _right(llama: Path) -> list[list[int]]:
    """The tokens of each of CASES."""
    return expected(llama, CASES)


async def failure_of(call: Awaitable[Any]) -> RemoteError:
    """The typed error that the call must end with."""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return from_rpc_error(failed.value)


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_second_try_is_right(world: World, right: list[list[int]], fault: str) -> None:
    world.faults.order(1, fault)
    at = FAULTS.index(fault)
    tokens, report = await run_split(world.context, world.failing, CASES[at], 9100 + at)
    assert tokens == right[at]
    assert not report.recomputed
    assert "planted" in " ".join(report.handoff_failures)
    await world.idle()


@pytest.mark.parametrize("fault", FAULTS)
async def test_twice_wrong_and_computed_by_those_who_should_receive(
    world: World, right: list[list[int]], fault: str
) -> None:
    world.faults.order(1, fault, 2)
    at = 2 + FAULTS.index(fault)
    tokens, report = await run_split(world.context, world.computing, CASES[at], 9100 + at)
    assert tokens == right[at]
    assert report.recomputed
    assert len(report.handoff_failures) == 2
    await world.idle()


@pytest.mark.parametrize("fault", FAULTS)
async def test_twice_wrong_and_told(world: World, right: list[list[int]], fault: str) -> None:
    world.faults.order(1, fault, 2)
    at = 4 + FAULTS.index(fault)
    error = await failure_of(run_split(world.context, world.failing, CASES[at], 9100 + at))
    assert isinstance(error.detail, errors_pb2.TransferFailed), error
    assert "planted" in error.detail.reason
    assert error.detail.context_instance_id == world.context.info.instance_id
    await world.idle()
    tokens, _ = await run_split(world.context, world.failing, CASES[at], 9110 + at)
    assert tokens == right[at]


async def test_one_rank_is_slow(world: World, right: list[list[int]]) -> None:
    """Rank 0 has delivered, rank 1 has not: nothing is decoded before it has."""
    params = await prefill(world.context, CASES[6], 9106)
    with world.faults.held(1):
        fetching = asyncio.create_task(fetch(world.failing, CASES[6], 9106, params))
        await asyncio.sleep(1.0)
        assert not fetching.done()
        assert (await world.failing.process.load()).used_blocks
    tokens, report = await fetching
    assert tokens == right[6]
    assert not report.handoff_failures
    await world.idle()


async def test_a_receiving_rank_dies(world: World) -> None:
    """Its instance ends; the context instance, whose write was on its way, gets its pages back."""
    params = await prefill(world.context, CASES[7], 9107)
    writer, victim = world.context.rank_processes[1], world.failing.rank_processes[1]
    writer.send_signal(signal.SIGSTOP)
    fetching = asyncio.create_task(fetch(world.failing, CASES[7], 9107, params))
    while not (await world.failing.process.load()).used_blocks:
        await asyncio.sleep(0.05)
    victim.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await fetching
    assert await world.failing.process.exit_code()
    assert f"engine process {victim.pid} (rank 1) was killed by SIGKILL" in world.failing.process.log
    writer.send_signal(signal.SIGCONT)
    await world.context.process.idle()


async def test_a_writing_rank_dies_and_the_prompt_is_computed(world: World, right: list[list[int]]) -> None:
    params = await prefill(world.context, CASES[8], 9108)
    victim = world.context.rank_processes[1]
    victim.send_signal(signal.SIGSTOP)
    fetching = asyncio.create_task(fetch(world.computing, CASES[8], 9108, params))
    while not (await world.computing.process.load()).used_blocks:
        await asyncio.sleep(0.05)
    victim.kill()
    tokens, report = await fetching
    assert tokens == right[8]
    assert report.recomputed
    await world.computing.process.idle()
    assert await world.context.process.exit_code()
