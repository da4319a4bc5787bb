"""vLLM with one tensor parallelism hands off to vLLM with another, and to the reference engine; LoRA. Nightly."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from isthmus.v1 import errors_pb2
from safetensors.numpy import save_file

from isthmus_core.errors import from_rpc_error
from tiny_models import tiny_llama
from vllm_world import World, running_world, torch_settings, vllm_settings
from worker_process import GENERATION

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]
LENGTHS = (1, 31, 32, 33, 64, 200, 1000)
HIDDEN, LAYERS, RANK = 256, 4, 8


def prompt(length: int) -> list[int]:
    """Different for every length."""
    return [(length * 13 + place * 7) % 300 + 5 for place in range(length)]


@pytest.fixture(scope="module")
def llama(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four KV heads of 32: two ranks share them. `model` skips where there is no vLLM."""
    folder = tmp_path_factory.mktemp("llama")
    return tiny_llama(folder / "llama", layers=LAYERS, hidden=HIDDEN, heads=8, kv_heads=4)


@pytest.fixture(scope="module")
def adapter(llama: Path) -> Path:
    """A LoRA adapter that changes what the model says."""
    folder = llama.parent / "poet"
    folder.mkdir()
    drawn = np.random.default_rng(5)
    weights: dict[str, np.ndarray] = {}
    for layer in range(LAYERS):
        for part, width in (("q_proj", HIDDEN), ("v_proj", HIDDEN // 2)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = drawn.normal(0, 0.3, (RANK, HIDDEN)).astype(np.float32)
            weights[f"{name}.lora_B.weight"] = drawn.normal(0, 0.3, (width, RANK)).astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "bias": "none", "lora_dropout": 0.0}))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World, None]:
    """One rank and two on either side, in blocks of 32 and 64."""
    settings = {
        "one-context": vllm_settings(llama, block_size=64),
        "two-context": vllm_settings(llama, tensor_parallel_size=2, block_size=32),
        "one-generation": vllm_settings(llama, block_size=32),
        "two-generation": vllm_settings(llama, tensor_parallel_size=2, block_size=64),
        "torch-generation": torch_settings(llama),
    }
    async with running_world(tmp_path_factory.mktemp("ranks"), settings) as running:
        yield running


PAIRS = [("two-context", "one-generation"), ("one-context", "two-generation"), ("two-context", "two-generation")]


@pytest.mark.parametrize("length", LENGTHS)
async def test_ranks_and_blocks_need_not_be_equal(ranks: World, length: int):
    want = await ranks.whole("torch-generation", prompt(length), 16)
    for pair in [*PAIRS, ("two-context", "torch-generation")]:
        assert await ranks.split(*pair, prompt(length), 16) == want, pair
    for pair in PAIRS:
        assert await ranks.at_once(*pair, [3, *prompt(length)][:length], 16) == [
            await ranks.whole("torch-generation", [3, *prompt(length)][:length], 16)
        ], pair
    await ranks.idle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def poets(llama: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World, None]:
    """A pair with an adapter, which fails a request whose cache does not come."""
    own = [f"engine.adapters={json.dumps({'poet': str(adapter)})}", "transfer.on_transfer_failure=fail"]
    settings = {name: [*vllm_settings(llama, block_size=32), *own] for name in ("poet-context", "poet-generation")}
    async with running_world(tmp_path_factory.mktemp("poets"), settings) as running:
        yield running


async def test_an_adapter_is_applied_on_both_sides_and_shares_no_blocks(poets: World):
    pair = ("poet-context", "poet-generation")
    plain = await poets.whole(pair[1], prompt(100), 24)
    want = await poets.whole(pair[1], prompt(100), 24, adapter="poet")
    assert want != plain
    for _ in range(2):  # the second time from the prefix caches
        assert await poets.split_answers(*pair, prompt(100), 24, adapter="poet") == [want]
        assert await poets.split(*pair, prompt(100), 24) == plain
    assert await poets.at_once(*pair, prompt(100), 24, adapter="poet", n=2) == [want, want]
    await poets.idle()


async def test_an_adapter_that_is_not_here_is_named(poets: World):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await poets.whole("poet-generation", prompt(10), 4, adapter="cook")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "known here are poet" in str(caught.value.details())


async def test_a_cache_that_does_not_come_fails_the_request_when_it_is_to(poets: World):
    number = poets.number()
    _, params = await poets.prefill("poet-context", prompt(150), 24, number)
    os.kill(poets.members["poet-context"].process.process.pid, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await poets.read("poet-generation", poets.leg(prompt(150), 24, kind=GENERATION, number=number, params=params))
    assert isinstance(from_rpc_error(caught.value).detail, errors_pb2.TransferFailed)
    await poets.restart("poet-context")
    await poets.idle()
