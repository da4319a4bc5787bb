"""Half an hour of mixed hand-offs between two workers: every text right, memory and descriptors flat, nothing left.

ISTHMUS_SOAK_S shortens it.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from array import array
from pathlib import Path

import psutil
import pytest

from mock_oracle import oracle
from worker_pair import Pair, running_pair
from worker_process import tokens

SOAK_S = float(os.environ.get("ISTHMUS_SOAK_S", "1800"))
# The first part of it fills caches and allocators.
WARM = 0.3
AT_ONCE = 16
# Of both workers and their engines together.
MOST_GROWTH, MOST_DESCRIPTORS = 32 << 20, 8

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(SOAK_S + 300)]


def _processes(pair: Pair) -> list[psutil.Process]:
    roots = [psutil.Process(one.process.pid) for one in (pair.context, pair.generation)]
    return [one for root in roots for one in (root, *root.children(recursive=True))]


def _held(pair: Pair) -> tuple[int, int]:
    """Bytes of memory and file descriptors."""
    processes = _processes(pair)
    return sum(one.memory_info().rss for one in processes), sum(one.num_fds() for one in processes)


async def _split(pair: Pair, prompt: list[int], count: int, number: int) -> None:
    first, params = await pair.prefill(prompt, count, number)
    rest = tokens(await pair.decode(prompt, count, params, number)) if count > 1 else []
    assert [*first, *rest] == oracle(prompt, count)


async def _together(pair: Pair, prompt: list[int], count: int, number: int) -> None:
    context, generation = pair.at_once(prompt, count, number)

    async def done() -> list[int]:
        answers = [one async for one in pair.context.stub.Generate(context, timeout=60)]
        chunks = answers[-1].context_ready.params.first_tokens
        return [token for one in chunks for token in array("I", one.tokens.le_uint32)]

    async def rest() -> list[int]:
        return tokens([one async for one in pair.generation.stub.Generate(generation, timeout=60)])

    first, after = await asyncio.gather(done(), rest())
    assert [*first, *after] == oracle(prompt, count)


async def _left(pair: Pair, prompt: list[int], count: int, number: int, patience_s: float) -> None:
    """The client goes away."""
    try:
        async with asyncio.timeout(patience_s):
            await _split(pair, prompt, count, number)
    except TimeoutError:
        pass


async def _traffic(pair: Pair, draw: random.Random, until: float, first_number: int) -> int:
    """Requests of every kind until a time. Returns how many there were."""
    numbers, room = iter(range(first_number, first_number + 1_000_000)), asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        prompt = [draw.randrange(32, 127) for _ in range(draw.choice([1, 15, 16, 17, 60, 200, 600]))]
        count, kind = draw.randint(2, 12), draw.random()
        try:
            if kind < 0.5:
                await _split(pair, prompt, count, number)
            elif kind < 0.85:
                await _together(pair, prompt, count, number)
            else:
                await _left(pair, prompt, count, number, draw.choice([0.002, 0.01, 0.05]))
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        while time.monotonic() < until:
            await room.acquire()
            group.create_task(one(next(numbers)))
    return next(numbers) - first_number


@pytest.mark.parametrize("policy", ["always", "cost"])
async def test_memory_and_descriptors_stay_flat(tmp_path: Path, policy: str):
    settings = (f"transfer.staging_policy={policy}", "transfer.handoff_hold_s=5", "engine.max_running=16")
    generation = ("engine.tokens_per_block=24", "cache.order=layer_major")
    async with running_pair(tmp_path, *settings, generation=generation) as pair:
        draw, span = random.Random(policy), SOAK_S / 2
        count = await _traffic(pair, draw, time.monotonic() + span * WARM, 1)
        await pair.idle()
        before = _held(pair)
        count += await _traffic(pair, draw, time.monotonic() + span * (1 - WARM), count + 1)
        await pair.idle()
        after = _held(pair)
        memory, descriptors = (f"{a} -> {b}" for a, b in zip(before, after, strict=True))
        print(f"{policy}: {count} requests; bytes {memory}; descriptors {descriptors}")
        assert after[0] - before[0] < MOST_GROWTH, f"{(after[0] - before[0]) >> 20} MiB more"
        assert after[1] - before[1] <= MOST_DESCRIPTORS, f"{after[1] - before[1]} descriptors more"
