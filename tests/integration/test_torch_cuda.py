"""The torch runner on a GPU: same tokens as on the CPU, memory described as device memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from greedy_driver import GreedySequence, blocks_for, run_greedy
from isthmus_worker.torch_engine import TorchRunner
from kvtransfer.page_table import MemoryKind
from tiny_llama import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_cuda_says_what_the_cpu_says(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", layers=4)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(4, 320, n).tolist() for n in (1, 15, 16, 17, 33, 300, 900)]
    answers: list[list[list[int]]] = []
    for device in ("cpu", "cuda"):
        runner = TorchRunner(folder, device=device)
        table = runner.allocate_cache(200)
        assert table.regions[0].memory_kind is (MemoryKind.VRAM if device == "cuda" else MemoryKind.DRAM)
        runner.warm_up()
        free = np.random.default_rng(1).permutation(200).tolist()
        sequences = [GreedySequence(p, [free.pop() for _ in range(blocks_for(len(p) + 24))], 64) for p in prompts]
        answers.append(run_greedy(runner, sequences, 24))
    assert answers[0] == answers[1]
