"""Every architecture and variant of it against transformers: same checkpoint, same greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greedy_driver import GreedySequence, blocks_for, open_oracle, oracle_greedy, run_greedy
from isthmus_worker.torch_engine import TorchRunner
from tiny_models import tiny_model

NEW_TOKENS = 24
NUM_BLOCKS = 128
# Windows and the contexts of the rope schemes end inside, at and far before the ends of these.
PROMPT_LENGTHS = (1, 5, 16, 17, 24, 25, 47, 100, 300)


def _rope(kind: str, **more: float | bool | None) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, every head its own": ("Llama", {"num_key_value_heads": 4}),
    "llama, scaled as llama3": ("Llama", _rope("llama3", **LLAMA3)),
    "llama, scaled linearly": ("Llama", _rope("linear", factor=2.5)),
    "llama, scaled dynamically": ("Llama", _rope("dynamic", factor=2.0)),
    "llama, yarn": ("Llama", _rope("yarn", **YARN)),
    "llama, yarn with mscale": ("Llama", _rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5, truncate=False)),
    "llama, yarn with a factor": ("Llama", _rope("yarn", **YARN, attention_factor=1.2, beta_fast=16.0, beta_slow=2.0)),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 32}),
    "mistral, window": ("Mistral", {"sliding_window": 24}),
    "mistral, window within a block": ("Mistral", {"sliding_window": 5}),
    "mistral, window of two": ("Mistral", {"sliding_window": 2}),
    "mistral, window of blocks": ("Mistral", {"sliding_window": 32}),
    "mistral, no window": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, upper layers slide": ("Qwen2", {**SLIDING, "num_hidden_layers": 4, "max_window_layers": 2}),
    "qwen2, every other layer slides": (
        "Qwen2",
        {**SLIDING, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, biases, tied": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3, upper layer slides": ("Qwen3", {**SLIDING, "head_dim": 16, "max_window_layers": 1}),
}


def _prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 320, n).tolist() for n in lengths]


def _sequences(prompts: list[list[int]], chunk: int) -> list[GreedySequence]:
    """Each on blocks of its own, in random order."""
    free = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    return [GreedySequence(p, [free.pop() for _ in range(blocks_for(len(p) + NEW_TOKENS))], chunk) for p in prompts]


def _runner(folder: Path, **options: Any) -> TorchRunner:
    runner = TorchRunner(folder, **options)
    runner.allocate_cache(NUM_BLOCKS)
    runner.warm_up()
    return runner


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, config = CASES[name]
    folder = tiny_model(tmp_path / "model", architecture, seed=5, **config)
    oracle = open_oracle(folder)
    prompts = _prompts()
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20  # not one token over and over
    runner = _runner(folder)
    # Chunks of 7 tokens put prefill chunks and decode rows of other requests into one step.
    for chunk in (7, 1000):
        assert run_greedy(runner, _sequences(prompts, chunk), NEW_TOKENS) == expected
    assert [run_greedy(runner, [one], NEW_TOKENS)[0] for one in _sequences(prompts, 64)] == expected
