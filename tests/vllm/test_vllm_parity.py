"""Token parity over prompts of 1 to 4,000 tokens, many at once, with and without the prefix cache. Nightly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from vllm_world import PAIRS, World, prompt, running_world, torch_settings, vllm_settings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(3600),
]

LENGTHS = (1, 2, 15, 16, 17, 31, 127, 128, 129, 255, 256, 511, 1000, 2047, 3000, 4000)


@pytest_asyncio.fixture(
    params=[True, False], ids=["prefix-cache", "no-prefix-cache"], scope="module", loop_scope="module"
)
async def chunked(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[World, None]:
    """Small steps, so that long prompts are computed in chunks; blocks of 64 and 128."""
    reuse = f"engine.prefix_caching={str(request.param).lower()}"
    steps = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
    settings = {
        "vllm-context": [*vllm_settings(model, **steps, block_size=64), reuse],
        "vllm-generation": [*vllm_settings(model, **steps), reuse],
        "torch-context": [*torch_settings(model), reuse],
        "torch-generation": [*torch_settings(model), reuse],
    }
    async with running_world(tmp_path_factory.mktemp("parity"), settings) as running:
        yield running


@pytest.mark.parametrize("length", LENGTHS)
async def test_every_length_on_every_pair(chunked: World, length: int):
    want = await chunked.whole("torch-generation", prompt(length), 24)
    assert await chunked.whole("vllm-generation", prompt(length), 24) == want
    for pair in PAIRS:
        assert await chunked.split(*pair, prompt(length), 24) == want, pair


async def test_sixteen_at_once(chunked: World):
    prompts = [prompt(40 + 53 * number) for number in range(16)]
    want = [await chunked.whole("torch-generation", one, 16) for one in prompts]
    for pair in PAIRS:
        got = await asyncio.gather(*(chunked.split(*pair, one, 16) for one in prompts))
        assert got == want, pair
    await chunked.idle()
