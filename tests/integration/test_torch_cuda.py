"""The torch runner on a GPU: same tokens as on the CPU, both kernels alike, memory described as device memory.

Runs wherever torch sees a GPU; the part about FlashInfer where flashinfer-python is installed (it compiles its kernels
on first use: minutes).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greedy_driver import GREEDY, GreedySequence, blocks_for, run_greedy, whole_shape
from isthmus_worker.runner import BatchRow
from isthmus_worker.torch_engine import TorchRunner
from isthmus_worker.torch_engine.attention import choose_attention, open_attention
from isthmus_worker.torch_engine.batch import plan_step
from isthmus_worker.torch_engine.joint_step import join
from isthmus_worker.torch_engine.kv_pool import KvPool
from isthmus_worker.torch_engine.loader import load_weights
from isthmus_worker.torch_engine.model import Decoder
from isthmus_worker.torch_engine.model_config import read_config
from kvtransfer.page_table import MemoryKind
from tiny_models import tiny_llama, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(540),
]
NUM_BLOCKS = 200
LENGTHS = (1, 15, 16, 17, 33, 300, 900)


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, 320, n).tolist() for n in LENGTHS]


def _lines(chunk: int) -> list[GreedySequence]:
    free = np.random.default_rng(1).permutation(NUM_BLOCKS).tolist()
    return [GreedySequence(p, [free.pop() for _ in range(blocks_for(len(p) + 24))], chunk) for p in _prompts()]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Llama", {"num_hidden_layers": 4}),
        ("Qwen3", {"head_dim": 32}),
        ("Mistral", {"sliding_window": 40}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    ],
)
def test_cuda_says_what_the_cpu_says(tmp_path: Path, architecture: str, config: dict[str, Any]) -> None:
    folder = tiny_model(tmp_path / "model", architecture, **config)
    answers: list[list[list[int]]] = []
    for device in ("cpu", "cuda"):
        runner = TorchRunner(folder, device=device)
        table = runner.allocate_cache(NUM_BLOCKS)
        assert table.regions[0].memory_kind is (MemoryKind.VRAM if device == "cuda" else MemoryKind.DRAM)
        runner.warm_up()
        answers.append(run_greedy(runner, _lines(64), 24))
    assert answers[0] == answers[1]


def _logits(folder: Path, asked: str, dtype: torch.dtype, steps: int) -> list[torch.Tensor]:
    """Of mixed steps: first and later chunks of prompts, and decode rows, whose tokens are given."""
    config, device = read_config(folder), torch.device("cuda", 0)
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        model = Decoder(config, 2048, dtype, device)
        load_weights(folder, model.targets(), config.tied)
        pool = KvPool(whole_shape(config, dtype), (NUM_BLOCKS,), config.head_dim, dtype, device)
        choice = choose_attention(asked, config, dtype, device)
        assert choice.name == asked
        attention = open_attention(choice, config.heads, pool)
        lines = _lines(256)
        for _ in range(steps):
            rows = [one.row() for one in lines]
            plan = plan_step(rows, pool.shapes, config.vocab_size, 2048)
            pool.begin_step(plan)
            found.append(model.forward(join(rows, 1, 0, plan), attention.begin(plan)).float().cpu())
            for one, row in zip(lines, rows, strict=True):
                one.done += len(row.token_ids)
                one.tokens += [one.done % 300 + 4] if row.draws else []
    return found


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer-python")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "kv_heads"),
    [("bfloat16", 64, 6, 2), ("float16", 64, 4, 1), ("bfloat16", 128, 4, 4)],
)
def test_flashinfer_computes_what_sdpa_computes(
    tmp_path: Path, dtype: str, head_dim: int, heads: int, kv_heads: int
) -> None:
    folder = tiny_llama(tmp_path / "model", heads=heads, kv_heads=kv_heads, hidden=96, head_dim=head_dim, dtype=dtype)
    kind = getattr(torch, dtype)
    for mine, theirs in zip(_logits(folder, "flashinfer", kind, 8), _logits(folder, "sdpa", kind, 8), strict=True):
        assert theirs.std() > 0.5  # the tolerance means something
        assert (mine - theirs).abs().max() < (0.2 if dtype == "bfloat16" else 0.03)


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer-python")
@pytest.mark.parametrize("first", [0, 1], ids=["all", "the second half"])
def test_flashinfer_computes_layers_with_a_window(tmp_path: Path, first: int) -> None:
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": first}
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = tiny_model(tmp_path / "model", "Qwen2", dtype="bfloat16", **sizes, **window)
    kind = torch.bfloat16
    for mine, theirs in zip(_logits(folder, "flashinfer", kind, 8), _logits(folder, "sdpa", kind, 8), strict=True):
        assert theirs.std() > 0.5
        assert (mine - theirs).abs().max() < 0.2


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer-python")
def test_flashinfer_is_the_choice_where_it_can_be(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", hidden=128, heads=2, kv_heads=1, dtype="bfloat16")
    runner = TorchRunner(folder, device="cuda")
    assert runner.describe().kernels == "flashinfer"
    runner.allocate_cache(8)
    runner.warm_up()
    ((drawn,),) = runner.execute([BatchRow(np.arange(4, 40), 0, (np.array([5, 1, 3], np.int32),), GREEDY)])
    assert 0 <= drawn.token < 320
