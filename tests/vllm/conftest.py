"""Tests with vLLM run where it is installed; elsewhere they say so, here and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from isthmus_worker.fetch_model import fetch_model
from vllm_world import METRICS, VLLM_PYTHON, World, running_world, torch_settings, vllm_settings


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the default model; skips when there is no vLLM."""
    if not VLLM_PYTHON.exists():
        pytest.skip(f"{VLLM_PYTHON} is missing: nothing of the vLLM engine is tested here; run make setup-vllm")
    return fetch_model()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World, None]:
    """Both roles on vLLM and on the reference engine, all pairs connected. Blocks of 128, 32, 16 and 32 tokens. What
    vLLM hands off goes through chunks."""
    settings = {
        "vllm-context": [*vllm_settings(model), "transfer.staging_policy=always", *METRICS],
        "vllm-generation": vllm_settings(model, block_size=32),
        "torch-context": torch_settings(model),
        "torch-generation": [*torch_settings(model), "engine.tokens_per_block=32"],
    }
    async with running_world(tmp_path_factory.mktemp("vllm"), settings) as running:
        yield running
