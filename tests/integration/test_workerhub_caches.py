"""Two worker processes with different caches: radix tree here, block table there, both schedules, drafts, reuse."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from mock_oracle import oracle
from worker_pair import Pair, running_pair
from worker_process import tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]
WINDOW = 50
SHARED = ("engine.mock.layers=4", f"engine.mock.sliding_window={WINDOW}", "engine.max_batch_tokens=64")
TREE = ("cache.manager=radix", "cache.order=layer_major", "engine.tokens_per_block=24", "engine.num_blocks=128")
TABLE = ("cache.layout=nhd", "engine.num_blocks=128", "engine.draft_tokens=4")


async def _read(call: Any) -> list[Any]:
    return [answer async for answer in call]


@pytest.fixture(name="pair")
async def _pair(tmp_path: Path) -> AsyncGenerator[Pair, None]:
    async with running_pair(tmp_path, *SHARED, context=TABLE, generation=TREE) as pair:
        yield pair


async def test_both_schedules_say_what_one_instance_would_and_nothing_is_left(pair: Pair):
    prompts = [[32 + (at * at + at // 50) % 95 for at in range(count)] for count in (30, 49, 50, 51, 200, 430)]

    async def one(number: int, prompt: list[int], at_once: bool) -> int:
        if at_once:
            sides = zip((pair.context, pair.generation), pair.at_once(prompt, 40, number), strict=True)
            calls = [side.stub.Generate(leg, timeout=60) for side, leg in sides]
            context, answers = await asyncio.gather(*map(_read, calls))
            first = list(array("I", context[-1].context_ready.params.first_tokens[0].tokens.le_uint32))
        else:
            first, params = await pair.prefill(prompt, 40, number)
            answers = await pair.decode(prompt, 40, params, number)
        assert first + tokens(answers) == oracle(prompt, 40, layers=4, window=WINDOW), (len(prompt), at_once)
        return answers[-1].finished.report.cached_tokens

    for start, at_once in ((0, False), (100, True)):
        cached = await asyncio.gather(*(one(start + at, prompt, at_once) for at, prompt in enumerate(prompts)))
    assert cached[-1] == 429 // 24 * 24, "of a prompt that was here before only the end comes again"
    await pair.idle()
    assert await pair.generation.stop() == 0
    assert await pair.context.stop() == 0
