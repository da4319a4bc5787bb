"""Ranks that disagree: the write of one is late, does not come, or ends with its process. No rank ever decodes what
another one has not got: the tokens would not be those of the unsplit run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from parity_fleet import Fleet, Instance, Shape, fetch, prefill, run_split
from parity_models import VOCAB
from parity_oracle import cases, expected

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]
Pair = tuple[Instance, Instance]


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="pair")
async def _pair(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> AsyncGenerator[Pair, None]:
    """Two ranks that write and two that receive; nobody is killed for being silent."""
    settings = ("transfer.in_doubt_s=300", "transfer.timeout_s=4")
    async with Fleet(tmp_path_factory.mktemp("agreement")) as fleet:
        yield await fleet.pair(Shape(llama, tp=2, settings=settings), Shape(llama, tp=2, settings=settings))


async def held(pair: Pair, number: int) -> tuple[Any, Any]:
    """A case whose cache is offered, its parameters; rank 1 of the context instance is stopped."""
    case = cases(VOCAB)[2]
    params = await prefill(pair[0], case, number)
    pair[0].rank_processes[1].send_signal(signal.SIGSTOP)
    return case, params


async def test_a_write_that_is_late(pair: Pair, llama: Path) -> None:
    """One half of the cache is there, the other is not: nothing is decoded."""
    case, params = await held(pair, 9001)
    decoding = asyncio.create_task(fetch(pair[1], case, 9001, params))
    await asyncio.sleep(1.0)
    assert not decoding.done()
    assert (await pair[1].process.load()).used_blocks
    pair[0].rank_processes[1].send_signal(signal.SIGCONT)
    tokens, report = await decoding
    assert tokens == expected(llama, cases(VOCAB))[2]
    assert not report.recomputed


async def test_a_write_that_does_not_come_in_time(pair: Pair, llama: Path) -> None:
    """The request fails on all ranks, the pages stay exposed while the write may still happen, and the next request is
    right."""
    case, params = await held(pair, 9002)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await fetch(pair[1], case, 9002, params)
    assert "hand-off" in (failed.value.details() or "") or failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (await pair[1].process.sessions()).sessions
    pair[0].rank_processes[1].send_signal(signal.SIGCONT)
    for one in pair:
        await one.process.idle()
    tokens, _ = await run_split(*pair, case, 9003)
    assert tokens == expected(llama, cases(VOCAB))[2]


async def test_a_rank_that_dies_while_it_should_write(pair: Pair, llama: Path) -> None:
    """Its instance ends, which proves that its writes are over: the generation instance gets its pages back."""
    case, params = await held(pair, 9004)
    fetching = asyncio.create_task(fetch(pair[1], case, 9004, params))
    await asyncio.sleep(0.5)
    victim = pair[0].rank_processes[1]
    victim.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await fetching
    assert await pair[0].process.exit_code()
    assert f"engine process {victim.pid} (rank 1) was killed by SIGKILL" in pair[0].process.log
    await pair[1].process.idle()
