"""The calls to FlashInfer, with a stand-in that computes what its documentation says, in plain torch on the CPU.

The kernels themselves run in tests/integration/test_torch_cuda.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from greedy_driver import GreedySequence, blocks_for, whole_shape
from isthmus_worker.torch_engine.attention.flashinfer import FlashInferBackend
from isthmus_worker.torch_engine.attention.sdpa import SdpaBackend
from isthmus_worker.torch_engine.batch import plan_step
from isthmus_worker.torch_engine.joint_step import join
from isthmus_worker.torch_engine.kv_pool import KvPool
from isthmus_worker.torch_engine.loader import load_weights
from isthmus_worker.torch_engine.model import Decoder
from isthmus_worker.torch_engine.model_config import read_config
from tiny_models import tiny_llama

NUM_BLOCKS = 64


class StandIn:
    """BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert workspace.dtype == torch.uint8
        assert (kv_layout, backend) == ("HND", "fa2")

    def plan(self, *arrays: Any, causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        assert causal
        assert q_data_type == kv_data_type
        assert all(one.dtype == torch.int32 for one in arrays[:4])
        self.tokens, self.pages, self.blocks, self.last_page = arrays[:4]
        self.sizes = arrays[4:]

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
                one[blocks]
                .transpose(0, 1)
                .reshape(kv_heads, -1, dim)[:, :length]
                .repeat_interleave(heads // kv_heads, 0)
                for one in cache
            )
            mine = query[self.tokens[row] : self.tokens[row + 1]].transpose(0, 1)
            unseen = torch.ones(mine.shape[1], length, dtype=torch.bool).triu(length - mine.shape[1] + 1)
            scores = (mine @ keys.transpose(1, 2) / dim**0.5).masked_fill(unseen, float("-inf"))
            found.append((scores.softmax(-1) @ values).transpose(0, 1))
        return torch.cat(found)


def test_it_computes_what_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    folder = tiny_llama(tmp_path / "model")
    config, device = read_config(folder), torch.device("cpu")
    rng = np.random.default_rng(0)
    free = rng.permutation(NUM_BLOCKS).tolist()
    lengths = (1, 15, 16, 17, 40, 100)
    prompts = [rng.integers(4, 320, n).tolist() for n in lengths]
    tables = [[free.pop() for _ in range(blocks_for(n + 8))] for n in lengths]
    logits: list[torch.Tensor] = []
    with torch.inference_mode():
        model = Decoder(config, 512, torch.float32, device)
        load_weights(folder, model.targets(), config.tied)
        for name in ("sdpa", "flashinfer"):
            pool = KvPool(whole_shape(config, torch.float32), (NUM_BLOCKS,), config.head_dim, torch.float32, device)
            attention = SdpaBackend(pool) if name == "sdpa" else FlashInferBackend(pool, config.heads)
            lines = [GreedySequence(p, table, 30) for p, table in zip(prompts, tables, strict=True)]
            for _ in range(6):  # whole prompts, first and later chunks, decode rows, all in one step
                rows = [one.row() for one in lines]
                plan = plan_step(rows, pool.shapes, config.vocab_size, 512)
                pool.begin_step(plan)
                logits.append(model.forward(join(rows, 1, 0, plan), attention.begin(plan)).clone())
                for one, row in zip(lines, rows, strict=True):
                    one.done += len(row.token_ids)
                    one.tokens += [one.done % 300 + 4] if row.draws else []
    half = len(logits) // 2
    for mine, theirs in zip(logits[:half], logits[half:], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
