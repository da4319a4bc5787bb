"""The torch runner against transformers: same checkpoint, same greedy tokens, same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greedy_driver import GreedySequence, blocks_for, open_oracle, oracle_greedy, run_greedy
from isthmus_worker.runner import BatchRow
from isthmus_worker.torch_engine import TorchRunner
from isthmus_worker.torch_engine.batch import CacheShape, plan_step
from isthmus_worker.torch_engine.kv_pool import KvPool
from isthmus_worker.torch_engine.loader import load_weights
from isthmus_worker.torch_engine.model import Llama
from isthmus_worker.torch_engine.model_config import read_config
from tiny_llama import tiny_llama

NEW_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 300)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one kv head, tied": {"kv_heads": 1, "tied": True},
    "no grouping, biases": {"kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "3 of 9 heads, deep": {"heads": 9, "kv_heads": 3, "hidden": 144, "layers": 5, "seed": 3},
    "other rope base": {"rope_theta": 100000.0, "seed": 4},
}


def _prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 320, n).tolist() for n in lengths]


def _runner(folder: Path, num_blocks: int = 128, **options: Any) -> TorchRunner:
    runner = TorchRunner(folder, **options)
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    return runner


def _sequences(prompts: list[list[int]], chunk: int, size: int = 16, num_blocks: int = 128) -> list[GreedySequence]:
    """Each on blocks of its own, in random order."""
    free = np.random.default_rng(1).permutation(num_blocks).tolist()
    counts = [blocks_for(len(prompt) + NEW_TOKENS, size) for prompt in prompts]
    return [GreedySequence(p, [free.pop() for _ in range(n)], chunk) for p, n in zip(prompts, counts, strict=True)]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = tiny_llama(tmp_path / "model", **SHAPES[name])
    oracle = open_oracle(folder)
    prompts = _prompts()
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20  # not one token over and over
    runner = _runner(folder)
    # Chunks of 7 tokens put prefill chunks and decode rows of other requests into one step.
    assert run_greedy(runner, _sequences(prompts, chunk=7), NEW_TOKENS) == expected


@pytest.mark.parametrize("tokens_per_block", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_neither_chunks_nor_block_size_change_the_tokens(tmp_path: Path, tokens_per_block: int, chunk: int) -> None:
    folder = tiny_llama(tmp_path / "model")
    oracle = open_oracle(folder)
    prompts = _prompts((1, 16, 33, 130))
    num_blocks = blocks_for(400, tokens_per_block) + 4
    runner = _runner(folder, num_blocks, tokens_per_block=tokens_per_block)
    sequences = _sequences(prompts, chunk, tokens_per_block, num_blocks)
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert run_greedy(runner, sequences, NEW_TOKENS) == expected


def test_rows_of_very_different_length_decode_together(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    oracle = open_oracle(folder)
    prompts = _prompts((1200, 3, 700, 290, 5, 17))
    runner = _runner(folder, 256)
    sequences = _sequences(prompts, 512, num_blocks=256)
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert run_greedy(runner, sequences, NEW_TOKENS) == expected


def test_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    prompts = _prompts()
    together = run_greedy(_runner(folder), _sequences(prompts, 7), NEW_TOKENS)
    alone = [run_greedy(_runner(folder), [one], NEW_TOKENS)[0] for one in _sequences(prompts, 64)]
    assert together == alone


def test_only_rows_that_want_a_token_get_one(tmp_path: Path) -> None:
    runner = _runner(tiny_llama(tmp_path / "model"))
    ids = np.arange(10, 20)
    rows = [BatchRow(ids, 0, np.array([block], np.int32), want) for block, want in enumerate((True, False, True))]
    first, middle, last = runner.execute(rows)
    assert first == last
    assert first >= 0
    assert middle == -1
    assert runner.execute([rows[1]]) == [-1]
    assert runner.execute([]) == []


def _logits(folder: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits after every position of `prompt`, one chunk a step."""
    config = read_config(folder)
    device = torch.device("cpu")
    with torch.inference_mode():
        model = Llama(config, 512, dtype, device)
        load_weights(folder, model.targets(), config.tied)
        pool = KvPool(config, 32, 16, dtype, device)
        shape = CacheShape(32, config.layers, config.kv_heads, 16)
        blocks = np.arange(32, dtype=np.int32)[::-1].copy()
        found: list[torch.Tensor] = []
        for begin in range(len(prompt)):
            row = BatchRow(np.array(prompt[begin : begin + 1], np.int64), begin, blocks, True)
            plan = plan_step([row], shape, config.vocab_size, 512)
            pool.begin_step(plan)
            found.append(model.forward(plan, pool).clone())
    return torch.cat(found).float()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.15)])
@pytest.mark.parametrize("name", ["grouped", "no grouping, biases"])
def test_logits_are_those_of_transformers(tmp_path: Path, dtype: str, tolerance: float, name: str) -> None:
    folder = tiny_llama(tmp_path / "model", dtype=dtype, **SHAPES[name])
    (prompt,) = _prompts((50,))
    with torch.inference_mode():
        expected = open_oracle(folder, dtype)(torch.tensor([prompt])).logits[0].float()
    mine = _logits(folder, prompt, getattr(torch, dtype))
    assert expected.std() > 0.5  # the tolerance means something
    assert (mine - expected).abs().max() < tolerance


def test_dtype_is_the_checkpoints_unless_asked_for(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", dtype="bfloat16")
    auto, wide = TorchRunner(folder).describe(), TorchRunner(folder, dtype="float32").describe()
    assert (auto.kv_dtype, wide.kv_dtype) == ("BF16", "F32")
    assert wide.bytes_per_block == 2 * auto.bytes_per_block
    assert auto.weights_digest == wide.weights_digest
    (prompt,) = _prompts((40,))
    expected = oracle_greedy(open_oracle(folder, "float32"), prompt, NEW_TOKENS)
    runner = _runner(folder, dtype="float32")
    assert run_greedy(runner, _sequences([prompt], 16), NEW_TOKENS) == [expected]
