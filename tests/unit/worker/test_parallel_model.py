"""A model in parts computes what it computes whole: ranks as threads, sums and sends by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greedy_driver import GreedySequence, run_greedy
from isthmus_core.config_parallel import ParallelConfig
from isthmus_core.errors import ConfigError
from isthmus_worker.runner import BatchRow, Drawn
from isthmus_worker.torch_engine.loader import model_digest
from isthmus_worker.torch_engine.model_config import ModelUnusable
from isthmus_worker.torch_engine.runner import TorchRunner
from thread_ranks import ThreadInstance
from tiny_models import tiny_llama, tiny_model

NEW_TOKENS = 6
SPLITS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "tp4, more ranks than kv heads": {"tensor_parallel_size": 4},
    "tp9, a query head each": {"tensor_parallel_size": 9},
    "pp2": {"pipeline_parallel_size": 2},
    "pp3 uneven": {"pipeline_parallel_size": 3, "layer_split": [1, 2, 1]},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp4 in two attention groups": {"tensor_parallel_size": 4, "data_parallel_size": 2},
    "two attention groups, pp2": {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 2},
}


class Grouped:
    """Deals the sequences of a driver out to attention-dp groups by their blocks."""

    def __init__(self, instance: ThreadInstance, groups: int) -> None:
        self._instance, self._groups = instance, groups

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        return self._instance.execute([replace(row, dp_rank=int(row.blocks[0][0]) % self._groups) for row in rows])


def _sequences() -> list[GreedySequence]:
    """Begin on an even block and an odd one: each group has some; chunks and answers are in one step."""
    rng = np.random.default_rng(0)
    blocks = ([0, 2, 4, 6], [1, 3, 5, 7], [8, 9])
    return [
        GreedySequence(rng.integers(4, 320, length).tolist(), own, 7)
        for length, own in zip((40, 23, 5), blocks, strict=True)
    ]


@pytest.fixture(scope="module", name="llama")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    # Heads, rows and vocabulary that do not divide evenly.
    return tiny_llama(folder, heads=9, kv_heads=3, hidden=144, layers=4, vocab=323, seed=3, intermediate_size=101)


@pytest.fixture(scope="module", name="whole")
def _whole(llama: Path) -> list[list[int]]:
    runner = TorchRunner(llama)
    runner.allocate_cache(16)
    return run_greedy(runner, _sequences(), NEW_TOKENS)


@pytest.mark.parametrize("name", SPLITS)
def test_tokens_are_those_of_the_whole_model(llama: Path, whole: list[list[int]], name: str):
    instance = ThreadInstance(llama, 16, **SPLITS[name])
    driver: Any = Grouped(instance, SPLITS[name].get("data_parallel_size", 1))
    assert run_greedy(driver, _sequences(), NEW_TOKENS) == whole
    instance.close()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}),
        ("Qwen2", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_norms_and_biases_are_split_too(tmp_path: Path, architecture: str, options: dict[str, Any]):
    folder = tiny_model(tmp_path / "model", architecture, **options)
    runner = TorchRunner(folder)
    runner.allocate_cache(16)
    expected = run_greedy(runner, _sequences(), NEW_TOKENS)
    instance = ThreadInstance(folder, 16, tensor_parallel_size=3, pipeline_parallel_size=2)
    assert run_greedy(instance, _sequences(), NEW_TOKENS) == expected  # type: ignore[arg-type]
    instance.close()


def test_every_rank_says_what_it_holds(llama: Path):
    instance = ThreadInstance(llama, 16, tensor_parallel_size=2, pipeline_parallel_size=2, layer_split=[3, 1])
    held = [
        (group.global_layer_ids, (group.views[0].kv_heads.begin, group.views[0].kv_heads.end))
        for table in instance.tables
        for group in table.groups
    ]
    assert held == [((0, 1, 2), (0, 2)), ((0, 1, 2), (2, 3)), ((3,), (0, 2)), ((3,), (2, 3))]
    instance.close()


def test_the_ranks_together_have_hashed_the_model_once(llama: Path):
    whole = TorchRunner(llama)
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    parts = [TorchRunner(llama, parallel=config, rank=rank) for rank in range(4)]
    names = [name for part in parts for name in part.digests]
    assert len(names) == len(set(names))
    merged = {name: digest for part in parts for name, digest in part.digests.items()}
    assert model_digest(merged) == whole.describe().weights_digest


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_names_all_that_is_wrong_with_a_checkpoint(tmp_path: Path, rank: int):
    """Also what another rank would have loaded: whoever speaks first tells everything."""
    from safetensors.torch import load_file, save_file

    folder = tiny_llama(tmp_path / "model", layers=2)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    weights["model.layers.0.self_attn.q_proj.weight"] = weights["model.layers.0.self_attn.q_proj.weight"][:8].clone()
    save_file(weights, folder / "model.safetensors")
    config = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ModelUnusable) as refused:
        TorchRunner(folder, parallel=config, rank=rank)
    assert "missing: model.layers.1.mlp.up_proj.weight" in refused.value.message
    assert "model.layers.0.self_attn.q_proj.weight has shape (8, 64), config.json asks for (64, 64)" in (
        refused.value.message
    )


def test_more_ranks_than_the_model_can_be_cut_into_are_refused(llama: Path):
    with pytest.raises(ConfigError, match="the model has 9 attention heads, use at most 9"):
        TorchRunner(llama, parallel=ParallelConfig(tensor_parallel_size=10))
    with pytest.raises(ConfigError, match="the model has 4 layers, use at most 4"):
        TorchRunner(llama, parallel=ParallelConfig(pipeline_parallel_size=5))
