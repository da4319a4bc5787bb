"""Workers that die, requests that are aborted, workers of the same name that come back, all under load. Nightly.

Afterwards every text is right and nobody holds a block: vLLM's own count is part of what `World.idle` looks at.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from vllm_world import World, running_world, torch_settings, vllm_settings
from worker_process import GENERATION, tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]
CONTEXT, DECODE, OTHER = "vllm-context", "vllm-generation", "torch-generation"


def prompt(number: int) -> list[int]:
    """Of 40 to 400 tokens, different for every number."""
    length = 40 + number * 83 % 360
    return [(number * 131 + place * 37) % 40_000 + 5 for place in range(length)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World, None]:
    """Few blocks, so that prompts are preempted and wait; steps of 128 tokens."""
    tight = {"num_gpu_blocks_override": 48, "block_size": 32, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    short = "engine.max_model_len=1024"
    settings = {
        CONTEXT: [*vllm_settings(model, **tight), short],
        DECODE: [*vllm_settings(model, **tight), short],
        OTHER: [*torch_settings(model), short],
    }
    async with running_world(tmp_path_factory.mktemp("faults"), settings) as running:
        yield running


async def one(world: World, number: int, schedule: str) -> list[int] | None:
    """The text of a request, or None when somebody it needed was gone."""
    try:
        (answer,) = await getattr(world, schedule)(CONTEXT, DECODE, prompt(number), 24)
    except (grpc.aio.AioRpcError, AssertionError, IndexError):
        return None
    return answer


async def right(world: World, texts: dict[int, list[int] | None]) -> int:
    """How many requests have been answered; every answer is that of one machine."""
    said = {number: text for number, text in texts.items() if text is not None}
    for number, text in said.items():
        assert text == await world.whole(OTHER, prompt(number), 24), number
    return len(said)


async def load(world: World, numbers: range, schedule: str) -> dict[int, list[int] | None]:
    texts = await asyncio.gather(*(one(world, number, schedule) for number in numbers))
    return dict(zip(numbers, texts, strict=True))


@pytest.mark.parametrize("schedule", ["split_answers", "at_once"])
async def test_more_than_fits_is_preempted_and_right(small: World, schedule: str):
    """48 blocks of 32 tokens, 24 requests at once."""
    numbers = range(24) if schedule == "at_once" else range(100, 124)
    assert await right(small, await load(small, numbers, schedule)) == 24
    await small.idle(CONTEXT, DECODE)


@pytest.mark.parametrize("schedule", ["split_answers", "at_once"])
async def test_aborts_before_during_and_after_the_transfer(small: World, schedule: str):
    """Of 24 requests two thirds are given up at moments drawn at random."""
    draw = random.Random(schedule)
    numbers = range(200, 224) if schedule == "at_once" else range(300, 324)
    tasks = {number: asyncio.create_task(one(small, number, schedule)) for number in numbers}
    for number in draw.sample(list(numbers), 16):
        await asyncio.sleep(draw.random() * 0.3)
        tasks[number].cancel()
    await asyncio.wait(tasks.values())
    texts = {number: task.result() for number, task in tasks.items() if not task.cancelled()}
    assert await right(small, texts) >= 8
    await small.idle(CONTEXT, DECODE)


def vllm_rank(world: World, name: str) -> psutil.Process:
    """A rank of vLLM below a worker."""
    children = psutil.Process(world.members[name].process.process.pid).children(recursive=True)
    return next(child for child in children if "VLLM::Worker" in " ".join([child.name(), *child.cmdline()]))


@pytest.mark.parametrize("victim", [CONTEXT, DECODE])
async def test_a_killed_worker_comes_back_under_its_name(small: World, victim: str):
    start = 400 if victim == CONTEXT else 500
    running = asyncio.create_task(load(small, range(start, start + 12), "split_answers"))
    await asyncio.sleep(1)
    os.kill(vllm_rank(small, victim).pid, signal.SIGKILL)
    texts = await running
    await right(small, texts)
    # What the dead one was still writing is in doubt until its successor proves that it is dead.
    await small.restart(victim)
    again = await load(small, range(start + 20, start + 28), "split_answers")
    assert await right(small, again) == 8
    await small.idle(CONTEXT, DECODE)


async def test_a_holder_that_is_gone_is_not_waited_for(small: World):
    """The context leg is done and its worker dies: the decode computes the prompt, and says so."""
    number = small.number()
    first, params = await small.prefill(CONTEXT, prompt(600), 24, number)
    os.kill(small.members[CONTEXT].process.process.pid, signal.SIGKILL)
    request = small.leg(prompt(600), 24, kind=GENERATION, number=number, params=params)
    said: list[Any] = await small.read(DECODE, request)
    assert said[-1].finished.report.recomputed
    assert first + tokens(said) == await small.whole(OTHER, prompt(600), 24)
    await small.restart(CONTEXT)
    await small.idle(CONTEXT, DECODE)
