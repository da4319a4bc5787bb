"""The real model: split = unsplit = transformers, token for token, in float32; and the demo."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from cluster import assert_idle, running_cluster
from isthmus_client import Client, Message
from isthmus_client.models import fetch_model
from isthmus_client.plan import ClusterOptions
from isthmus_client.supervisor import LocalCluster

pytestmark = [pytest.mark.model, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
ISTHMUS = Path(sys.executable).parent / "isthmus"
NEW_TOKENS = 12
TEXT = (
    "The isthmus joins two seas and two continents. Ships that would have sailed around a whole continent pass it in a "
    "day, and everything that is carried across is counted, weighed and written down before it may go on. "
)


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="model")
async def _model() -> Path:
    return await fetch_model("default")


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="prompts")
async def _prompts(model: Path) -> list[list[int]]:
    """12 prompts: one token, around and on multiples of the block size, one of over 2,000 tokens."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    ids: list[int] = tokenizer.encode(TEXT * 60)
    lengths = (1, 2, 7, 15, 16, 17, 32, 33, 64, 100, 255, 2100)
    return [ids[start : start + length] for start, length in enumerate(lengths)]


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="expected")
async def _expected(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    results: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
        )
        results.append(output[0, len(prompt) :].tolist())
    return results


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="split")
async def _split(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[LocalCluster, None]:
    options = ClusterOptions(context=1, generation=1, engine="torch", model_path=model)
    async with running_cluster(options, tmp_path_factory.mktemp("split")) as cluster:
        yield cluster


async def _one_at_a_time(cluster: LocalCluster, prompts: list[list[int]]) -> list[list[int]]:
    async with Client(cluster.grpc_endpoint) as client:
        return [
            list((await client.answer(prompt, max_tokens=NEW_TOKENS, temperature=0)).token_ids) for prompt in prompts
        ]


async def test_split_equals_transformers(split: LocalCluster, prompts: list[list[int]], expected: list[list[int]]):
    assert await _one_at_a_time(split, prompts) == expected
    await assert_idle(split)


async def test_eight_at_once_equal_one_at_a_time(
    split: LocalCluster, prompts: list[list[int]], expected: list[list[int]]
):
    async with Client(split.grpc_endpoint) as client:
        calls = (client.answer(prompt, max_tokens=NEW_TOKENS, temperature=0) for prompt in prompts[3:11])
        answers = await asyncio.gather(*calls)
    assert [list(answer.token_ids) for answer in answers] == expected[3:11]
    await assert_idle(split)


async def test_a_question_gets_its_answer(split: LocalCluster):
    async with Client(split.grpc_endpoint) as client:
        answer = await client.answer([Message("user", "What is the capital of France?")], max_tokens=32, temperature=0)
    assert answer.text == "The capital of France is Paris."
    assert answer.end.reason == "stop"
    handoff = answer.end.timeline.handoff
    assert handoff is not None
    # 30 layers x (K and V) x 3 heads x 64 x 4 bytes for every slot of the whole blocks of the prompt
    blocks = -(-answer.end.prompt_tokens // 16)
    assert handoff.bytes == blocks * 16 * 30 * 2 * 3 * 64 * 4
    await assert_idle(split)


async def test_unsplit_equals_transformers(
    model: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
):
    options = ClusterOptions(context=0, generation=0, unsplit=1, engine="torch", model_path=model)
    async with running_cluster(options, tmp_path) as cluster:
        assert await _one_at_a_time(cluster, prompts) == expected
        await assert_idle(cluster)


async def test_the_demo_answers_shows_the_timeline_and_leaves_with_zero(model: Path, tmp_path: Path):
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "160"}
    result = await asyncio.to_thread(
        subprocess.run, [ISTHMUS, "demo"], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "The capital of France is Paris." in result.stdout
    for words in ("prefill", "hand-off", "descriptors over nixl/", "GB/s", "first token", "tokens/s"):
        assert words in result.stdout
