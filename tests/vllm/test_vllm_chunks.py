"""Chunks through arenas between vLLM and the reference engine: other ranks, other blocks, switched off. Nightly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from fake_coordinator import FakeCoordinator
from tiny_models import tiny_llama
from vllm_world import ENVIRONMENT, METRICS, World, running_world, torch_settings, vllm_settings
from worker_process import worker

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]
LENGTHS = (1, 63, 64, 65, 900)
LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 32
TOKEN_BYTES = LAYERS * KV_HEADS * HEAD_DIM * 2 * 4
APART = ["engine.prefix_caching=false"]  # every hand-off moves the whole prompt
ALWAYS = ["transfer.staging_policy=always", *METRICS, *APART]
CHUNKS = [("two-context", "one-generation"), ("two-context", "torch-generation"), ("torch-context", "one-generation")]


def prompt(length: int) -> list[int]:
    """Different for every length."""
    return [(length * 13 + place * 7) % 300 + 5 for place in range(length)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World, None]:
    """Blocks of 32, 64, 128 and 16 tokens. `model` skips where there is no vLLM."""
    folder = tmp_path_factory.mktemp("chunks")
    llama = tiny_llama(folder / "llama", layers=LAYERS, hidden=256, heads=8, kv_heads=KV_HEADS)
    settings = {
        "two-context": [*vllm_settings(llama, tensor_parallel_size=2, block_size=32), *ALWAYS],
        "off-context": [*vllm_settings(llama, block_size=128), "transfer.arena_bytes=0", *ALWAYS],
        "torch-context": [*torch_settings(llama), *ALWAYS],
        "one-generation": [*vllm_settings(llama, block_size=64), *APART],
        "torch-generation": [*torch_settings(llama), *APART],
    }
    async with running_world(folder, settings) as running:
        yield running


async def bytes_of(world: World, name: str, mode: str, least: float) -> float:
    """Bytes written that way, once there are as many."""
    while (written := await world.written(name, mode)) < least:
        await asyncio.sleep(0.05)
    return written


@pytest.mark.parametrize("length", LENGTHS)
async def test_chunks_bring_the_cache_of_other_ranks_and_blocks(world: World, length: int):
    want = await world.whole("torch-generation", prompt(length), 16)
    for pair in CHUNKS:
        before = await world.written(pair[0], "bounced")
        assert await world.split(*pair, prompt(length), 16) == want, pair
        await bytes_of(world, pair[0], "bounced", before + length * TOKEN_BYTES)
        assert await world.written(pair[0], "direct") == 0, pair
    await world.idle()


async def test_nothing_is_bounced_without_memory_for_it(world: World):
    ids = [3, *prompt(300)]
    want = await world.whole("torch-generation", ids, 16)
    for generation in ("one-generation", "torch-generation"):
        before = await world.written("off-context", "direct")
        assert await world.split("off-context", generation, ids, 16) == want
        await bytes_of(world, "off-context", "direct", before + len(ids) * TOKEN_BYTES)
    assert await world.written("off-context", "bounced") == 0
    await world.idle()


async def test_an_arena_that_is_too_small_is_refused_before_the_model_is_loaded(model: Path, tmp_path: Path):
    async with FakeCoordinator() as coordinator:
        given = [*vllm_settings(model), "worker.role=context", "transfer.arena_bytes=1048576"]
        async with worker(tmp_path, coordinator.address, *given, **ENVIRONMENT) as refused:
            assert await refused.exit_code() == 2
            assert f"the least is {64 << 20} bytes (transfer.arena_bytes, transfer.max_peers)" in refused.log
