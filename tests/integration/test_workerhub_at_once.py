"""Both legs at once between two worker processes: the cache moves while the prompt is computed, every end is told."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from isthmus.v1 import errors_pb2

from isthmus_core.errors import from_rpc_error
from mock_oracle import oracle
from worker_pair import Pair, running_pair
from worker_process import tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]
# Steps of 64 tokens, 32 ms each: a prompt of 640 tokens takes ten of them.
SLOW = ("engine.max_batch_tokens=64", "engine.mock.prefill_us_per_token=500", "engine.prefix_caching=false")


@pytest.fixture(name="pair")
async def _pair(tmp_path: Path) -> AsyncGenerator[Pair, None]:
    async with running_pair(tmp_path, *SLOW) as pair:
        yield pair


async def _read(call: Any) -> list[Any]:
    return [answer async for answer in call]


def _start(pair: Pair, prompt: list[int], max_tokens: int, number: int = 0) -> tuple[Any, Any]:
    context, generation = pair.at_once(prompt, max_tokens, number)
    return pair.context.stub.Generate(context, timeout=60), pair.generation.stub.Generate(generation, timeout=60)


async def _states(worker: Any) -> list[str]:
    return [one.state for one in (await worker.sessions()).sessions]


async def test_pages_are_written_while_the_prompt_is_computed(pair: Pair):
    prompt = [32 + index * 7 % 95 for index in range(3200)]
    context, generation = (asyncio.create_task(_read(call)) for call in _start(pair, prompt, 9))
    while "writing" not in await _states(pair.context):
        await asyncio.sleep(0.01)
    assert not context.done(), "a KvRequest is served before the prompt is computed"
    first = (await context)[-1].context_ready.params.first_tokens
    answers = await generation
    assert [*array("I", first[0].tokens.le_uint32), *tokens(answers)] == oracle(prompt, 9)
    handoff = answers[-1].finished.report.handoff
    assert handoff.descriptors >= 50, "one for each step of the prefill"
    await pair.idle()


async def test_many_at_once_say_what_one_instance_would(pair: Pair):
    async def one(number: int) -> None:
        prompt = [32 + (number * 11 + index) % 95 for index in range(1 + number * 23)]
        context, generation = await asyncio.gather(*map(_read, _start(pair, prompt, 12, number)))
        first = context[-1].context_ready.params.first_tokens
        assert [*array("I", first[0].tokens.le_uint32), *tokens(generation)] == oracle(prompt, 12)

    await asyncio.gather(*(one(number) for number in range(12)))
    await pair.idle()
    assert await pair.generation.stop() == 0
    assert await pair.context.stop() == 0


async def test_a_first_token_that_ends_the_request_ends_both_legs_without_a_hand_off(pair: Pair):
    prompt = [65] * 640
    context, generation = await asyncio.gather(*map(_read, _start(pair, prompt, 1)))
    assert tokens(context) == oracle(prompt, 1)
    assert context[-1].HasField("finished")
    assert [one.WhichOneof("event") for one in generation] == ["finished"]
    assert not generation[-1].finished.report.HasField("handoff")
    await pair.idle()


@pytest.mark.parametrize("gone", ["context", "generation"])
async def test_a_leg_that_is_cancelled_during_the_prefill_ends_the_other(pair: Pair, gone: str):
    calls = dict(zip(("context", "generation"), _start(pair, [65] * 640, 50), strict=True))
    while "writing" not in await _states(pair.context):
        await asyncio.sleep(0.01)
    calls.pop(gone).cancel()
    ((_, other),) = calls.items()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _read(other)
    assert isinstance(from_rpc_error(caught.value).detail, errors_pb2.TransferFailed)
    await pair.idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_leg_whose_context_leg_is_cancelled_goes_on_alone(tmp_path: Path, policy: str):
    prompt = [32 + index * 7 % 95 for index in range(640)]
    async with running_pair(tmp_path, *SLOW, f"transfer.on_transfer_failure={policy}") as pair:
        legs = pair.at_once(prompt, 9, may_take_over=True)
        context = pair.context.stub.Generate(legs[0], timeout=60)
        generation = asyncio.create_task(_read(pair.generation.stub.Generate(legs[1], timeout=60)))
        while "writing" not in await _states(pair.context):
            await asyncio.sleep(0.01)
        context.cancel()
        if policy == "fail":
            with pytest.raises(grpc.aio.AioRpcError):
                await generation
        else:
            first, *answers = await generation
            assert first.took_over.reason
            assert tokens(answers) == oracle(prompt, 9)
            assert answers[-1].finished.report.recomputed
            assert answers[-1].finished.report.decode_tokens == 8, "the first one was the prefill's"
        await pair.idle()


async def test_legs_that_are_cancelled_at_any_time_leave_nothing(pair: Pair):
    async def one(number: int) -> None:
        calls = _start(pair, [65 + number] * 300, 100, number)
        reads = [asyncio.create_task(_read(call)) for call in calls]
        await asyncio.sleep(number * 0.02)
        for call in calls[:: 1 if number % 2 else -1]:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    await asyncio.gather(*(one(number) for number in range(24)))
    await pair.idle()


async def test_a_context_engine_that_dies_during_the_prefill_is_a_typed_error(pair: Pair):
    context, generation = (asyncio.create_task(_read(call)) for call in _start(pair, [65] * 3200, 9))
    while "writing" not in await _states(pair.context):
        await asyncio.sleep(0.01)
    pair.context.engine.kill()
    for task in (context, generation):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await task
        assert from_rpc_error(caught.value).detail is not None
    assert await pair.context.exit_code() == 4
    await pair.generation.idle()
