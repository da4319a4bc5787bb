"""A context hub and a generation hub as processes, real transfer agents between their engines, the test as router."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest
from isthmus.v1 import worker_service_pb2

from isthmus_core.errors import from_rpc_error
from mock_oracle import oracle
from worker_pair import Pair, running_pair
from worker_process import GENERATION, leg, tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]


@pytest.fixture(name="on_failure")
def _on_failure() -> str:
    return "fail"


@pytest.fixture(name="pair")
async def _pair(tmp_path: Path, on_failure: str) -> AsyncGenerator[Pair, None]:
    settings = ("transfer.handoff_hold_s=3", "engine.mock.decode_us=1000")
    async with running_pair(tmp_path, *settings, f"transfer.on_transfer_failure={on_failure}") as pair:
        yield pair


async def test_a_cache_prefilled_here_is_decoded_there(pair: Pair):
    async def one(number: int) -> None:
        prompt = [32 + (number * 11 + index) % 95 for index in range(1 + number * 37)]
        first, params = await pair.prefill(prompt, 12, number)
        answers = await pair.decode(prompt, 12, params, number)
        assert first + tokens(answers) == oracle(prompt, 12)
        handoff = answers[-1].finished.report.handoff
        assert handoff.bytes >= len(prompt)
        assert handoff.path.startswith("nixl/")

    await asyncio.gather(*(one(number) for number in range(20)))
    await pair.idle()
    assert await pair.generation.stop() == 0
    assert await pair.context.stop() == 0


async def test_abort_withdraws_held_pages(pair: Pair):
    prompt = [65] * 100
    _, params = await pair.prefill(prompt, 5)
    while not (await pair.context.load()).used_blocks:  # the engine tells its load at most every 0.2 s
        await asyncio.sleep(0.02)
    await pair.context.stub.Abort(worker_service_pb2.AbortRequest(key=params.key))
    await pair.idle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.decode(prompt, 5, params)
    assert from_rpc_error(caught.value).detail is not None
    await pair.idle()


async def test_a_caller_that_goes_away_during_the_generation_leg_leaves_nothing(pair: Pair):
    prompt = [65] * 500
    for number in range(5):
        _, params = await pair.prefill(prompt, 400, number)
        call = pair.generation.stub.Generate(leg(prompt, 400, kind=GENERATION, number=number, params=params))
        if number % 2:
            await call.read()
        call.cancel()
    await pair.idle()


async def test_a_context_engine_that_dies_with_held_pages_is_a_typed_error(pair: Pair):
    prompt = [65] * 300
    _, params = await pair.prefill(prompt, 5)
    pair.context.engine.kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.decode(prompt, 5, params)
    error = from_rpc_error(caught.value)
    assert error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
    assert error.detail is not None
    assert await pair.context.exit_code() == 4
    await pair.generation.idle()


@pytest.mark.parametrize("on_failure", ["recompute"])
async def test_a_context_engine_that_dies_with_held_pages_costs_time_and_no_answer(pair: Pair):
    prompt = [32 + index * 7 % 95 for index in range(300)]
    first, params = await pair.prefill(prompt, 12)
    pair.context.engine.kill()
    answers = await pair.decode(prompt, 12, params)
    assert first + tokens(answers) == oracle(prompt, 12)
    report = answers[-1].finished.report
    assert report.recomputed
    assert report.handoff_failures
    assert "its prompt was computed here" in pair.generation.log
    assert await pair.context.exit_code() == 4
    await pair.generation.idle()


async def test_a_draining_context_instance_keeps_held_pages_until_they_are_fetched(pair: Pair):
    prompt = [65] * 300
    first, params = await pair.prefill(prompt, 5)
    pair.context.process.send_signal(signal.SIGTERM)
    while "draining" not in pair.context.log:
        await asyncio.sleep(0.01)
    answers = await pair.decode(prompt, 5, params)
    assert first + tokens(answers) == oracle(prompt, 5)
    assert await pair.context.exit_code() == 0


async def test_pages_that_nobody_fetches_expire_and_do_not_stop_a_drain(pair: Pair):
    await pair.prefill([65] * 300, 5)
    assert await pair.context.stop() == 0
    assert "worker.drain_s" not in pair.context.log


async def test_a_context_hub_that_is_killed_is_a_typed_error(pair: Pair):
    prompt = [65] * 300
    _, params = await pair.prefill(prompt, 5)
    pair.context.process.kill()
    await pair.context.exit_code()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.decode(prompt, 5, params)
    assert from_rpc_error(caught.value).code is grpc.StatusCode.UNAVAILABLE
    load = await pair.generation.load()
    assert load.running_requests == 0
