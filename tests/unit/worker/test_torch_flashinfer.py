"""The calls to FlashInfer, with a stand-in that computes what its documentation says, in plain torch on the CPU.

The kernels themselves run in tests/integration/test_torch_cuda.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from greedy_driver import GreedySequence, blocks_for, whole_shape
from isthmus_worker.cache.layout import CacheOptions
from isthmus_worker.runner import BatchRow
from isthmus_worker.torch_engine.attention.flashinfer import FlashInferBackend
from isthmus_worker.torch_engine.attention.sdpa import SdpaBackend
from isthmus_worker.torch_engine.batch import plan_step
from isthmus_worker.torch_engine.joint_step import join
from isthmus_worker.torch_engine.kv_pool import KvPool
from isthmus_worker.torch_engine.loader import load_weights
from isthmus_worker.torch_engine.model import Decoder
from isthmus_worker.torch_engine.model_config import read_config
from tiny_models import tiny_model

NUM_BLOCKS = 64


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert backend == "fa2"
        self.tokens_first = kv_layout == "NHD"

    def plan(
        self, *arrays: Any, causal: bool, window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        assert all(one.dtype == torch.int32 for one in arrays[:4])
        self.tokens, self.pages, self.blocks, self.last_page = arrays[:4]
        self.sizes, self.window_left = arrays[4:], window_left

    def run(self, query: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, dim, page = self.sizes
        assert query.is_contiguous()
        assert query.shape[1:] == (heads, dim)
        assert cache[0].stride() == cache[1].stride()
        found: list[torch.Tensor] = []
        for row, last in enumerate(self.last_page.tolist()):
            blocks = self.blocks[self.pages[row] : self.pages[row + 1]]
            length = (len(blocks) - 1) * page + last
            # [kv_heads, length, dim], each head repeated for its query heads.
            keys, values = (
                (one.transpose(1, 2) if self.tokens_first else one)[blocks]
                .transpose(0, 1)
                .reshape(kv_heads, -1, dim)[:, :length]
                .repeat_interleave(heads // kv_heads, 0)
                for one in cache
            )
            mine = query[self.tokens[row] : self.tokens[row + 1]].transpose(0, 1)
            at, own = torch.arange(length)[None], torch.arange(length - mine.shape[1], length)[:, None]
            unseen = at > own
            if self.window_left >= 0:
                unseen |= at < own - self.window_left
            scores = (mine @ keys.transpose(1, 2) / dim**0.5).masked_fill(unseen, float("-inf"))
            found.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(found)


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Llama", {}),
    "one_window": ("Mistral", {"sliding_window": 20}),
    "mixed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
}
LENGTHS = (1, 15, 16, 17, 40, 100)


@pytest.mark.parametrize("options", [CacheOptions(), CacheOptions(nhd=True, separate=True)], ids=["shared", "separate"])
@pytest.mark.parametrize("made", MODELS)
def test_it_computes_what_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, options: CacheOptions
) -> None:
    """Whole prompts, first and later chunks and decode rows, all in one step. What is in front of a window is not a
    number, as bytes that nobody has sent may be."""
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    architecture, sizes = MODELS[made]
    folder = tiny_model(tmp_path / "model", architecture, **sizes)
    mine, theirs = (_logits(folder, name, options) for name in ("flashinfer", "sdpa"))
    for one, other in zip(mine, theirs, strict=True):
        assert bool(other.isfinite().all())
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)


def _logits(folder: Path, kernels: str, options: CacheOptions) -> list[torch.Tensor]:
    config, device = read_config(folder), torch.device("cpu")
    rng = np.random.default_rng(0)
    free = rng.permutation(NUM_BLOCKS).tolist()
    tables = [[free.pop() for _ in range(blocks_for(length + 8))] for length in LENGTHS]
    prompts = [rng.integers(4, 320, length).tolist() for length in LENGTHS]
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        model = Decoder(config, 512, torch.float32, device)
        load_weights(folder, model.targets(), config.tied)
        shape = whole_shape(config, torch.float32, options)
        pool = KvPool(shape, (NUM_BLOCKS,) * shape.lists, config.head_dim, torch.float32, device)
        attention = SdpaBackend(pool) if kernels == "sdpa" else FlashInferBackend(pool, config.heads)
        lines = [GreedySequence(prompt, table, 30) for prompt, table in zip(prompts, tables, strict=True)]
        for _ in range(6):
            rows = [replace(row, blocks=row.blocks * shape.lists) for row in (one.row() for one in lines)]
            for row in rows:
                _spoil(pool, row)
            plan = plan_step(rows, pool.shapes, config.vocab_size, 512)
            pool.begin_step(plan)
            found.append(model.forward(join(rows, 1, 0, plan), attention.begin(plan)).clone())
            for one, row in zip(lines, rows, strict=True):
                one.done += len(row.token_ids)
                one.tokens += [one.done % 300 + 4] if row.draws else []
    return found


def _spoil(pool: KvPool, row: BatchRow) -> None:
    """What no token of the row sees."""
    size = pool.tokens_per_block
    for layer, window in enumerate(pool.windows):
        for at in range(0 if window is None else max(0, row.start - window + 1)):
            pool.blocks[layer][int(row.blocks[0][at // size]), :, :, at % size] = float("nan")
