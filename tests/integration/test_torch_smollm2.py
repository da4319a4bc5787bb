"""SmolLM2-135M in the torch runner, token for token what transformers says. The model is fetched once and cached."""

# Greedy in float32; the prompts are text, so that ties between tokens are as rare as they are in use.

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greedy_driver import GreedySequence, blocks_for, open_oracle, oracle_greedy, run_greedy
from isthmus_worker.fetch_model import fetch_model
from isthmus_worker.torch_engine import TorchRunner

pytestmark = [pytest.mark.model, pytest.mark.integration, pytest.mark.timeout(600)]

NUM_BLOCKS = 600
NEW_TOKENS = 12
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 129, 500, 2100)
TEXT = (
    "The isthmus joins two lands and parts two seas. Ships once sailed ten thousand miles to pass it; now a canal cuts "
    "through the hills, and pilots guide the hulls from lock to lock. In spring the rain fills the lake above them; "
    "in summer {} engineers measure its level every {} hours, because water that has run down does not come back. "
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return fetch_model()


@pytest.fixture(scope="module")
def runner(folder: Path) -> TorchRunner:
    runner = TorchRunner(folder)
    runner.allocate_cache(NUM_BLOCKS)
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def cases(folder: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt, expected tokens) for every length."""
    ids = tokenizer("".join(TEXT.format(n + 2, n + 5) for n in range(40))).input_ids
    oracle = open_oracle(folder)
    prompts = [ids[7 * i : 7 * i + n] for i, n in enumerate(LENGTHS)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    return [(prompt, oracle_greedy(oracle, prompt, NEW_TOKENS)) for prompt in prompts]


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_twelve_prompts_in_mixed_batches(
    runner: TorchRunner, cases: list[tuple[list[int], list[int]]], chunk: int
) -> None:
    # 2,100 tokens in chunks of 7 would be 300 steps and say nothing new.
    chosen = cases if chunk > 7 else cases[:-1]
    free = np.random.default_rng(chunk).permutation(NUM_BLOCKS).tolist()
    sequences = [
        GreedySequence(prompt, [free.pop() for _ in range(blocks_for(len(prompt) + NEW_TOKENS))], chunk)
        for prompt, _ in chosen
    ]
    assert run_greedy(runner, sequences, NEW_TOKENS) == [expected for _, expected in chosen]


def test_one_request_alone(runner: TorchRunner, cases: list[tuple[list[int], list[int]]]) -> None:
    for prompt, expected in cases[3:9]:
        sequence = GreedySequence(prompt, range(100, 100 + blocks_for(len(prompt) + NEW_TOKENS)))
        assert run_greedy(runner, [sequence], NEW_TOKENS) == [expected]


def test_it_knows_the_capital_of_france(runner: TorchRunner, tokenizer: Any) -> None:
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    answer = run_greedy(runner, [GreedySequence(prompt, range(10, 20))], 8)[0]
    assert tokenizer.decode(answer).startswith("The capital of France is Paris.")


def test_description(runner: TorchRunner) -> None:
    about = runner.describe()
    assert (about.name, about.vocab_size, about.max_model_len) == ("SmolLM2-135M-Instruct", 49152, 8192)
    assert (about.bytes_per_block, about.kv_dtype) == (46_080 * 16, "F32")
