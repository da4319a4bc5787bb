"""Every layout, order and manager of the torch engine's cache computes what transformers does, windows included."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from greedy_driver import GREEDY, open_oracle, oracle_greedy
from isthmus_worker.cache import BlockManager, BlockTable, CacheManager
from isthmus_worker.cache.base import Need
from isthmus_worker.cache.layout import CacheOptions
from isthmus_worker.cache.radix_cache import RadixCache
from isthmus_worker.runner import BatchRow
from isthmus_worker.torch_engine import TorchRunner
from tiny_models import tiny_model

WINDOW, BLOCK, NEW = 20, 8, 12
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
OPTIONS = [CacheOptions(*flags) for flags in product((False, True), repeat=3)]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("mixed") / "model",
        "Qwen2",
        num_hidden_layers=3,
        layer_types=TYPES,
        use_sliding_window=True,
        sliding_window=WINDOW,
    )


@pytest.fixture(name="prompts", scope="module")
def _prompts() -> list[NDArray[np.int64]]:
    draw = np.random.default_rng(3)
    return [draw.integers(4, 320, count) for count in (5, 41, 77)]


@pytest.fixture(name="expected", scope="module")
def _expected(folder: Path, prompts: list[NDArray[np.int64]]) -> list[list[int]]:
    model = open_oracle(folder)
    return [oracle_greedy(model, prompt.tolist(), NEW) for prompt in prompts]


def manager(options: CacheOptions, windows: tuple[int | None, ...]) -> CacheManager:
    if options.separate:
        return RadixCache((40,) * len(windows), windows, BLOCK)
    return BlockTable(BlockManager(40, BLOCK))


def name(options: CacheOptions) -> str:
    words = [("hnd", "nhd"), ("slot_major", "layer_major"), ("block_table", "radix")]
    flags = (options.nhd, options.layer_major, options.separate)
    return "-".join(pair[flag] for pair, flag in zip(words, flags, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=name)
def test_tokens_are_those_of_transformers(
    folder: Path, prompts: list[NDArray[np.int64]], expected: list[list[int]], options: CacheOptions
):
    """Prompts in chunks, then all together; blocks that left the window are given back and used by the others."""
    runner = TorchRunner(folder, tokens_per_block=BLOCK, cache=options)
    cache = manager(options, runner.describe().windows)
    table = runner.allocate_cache(*cache.num_blocks)
    assert [one.sliding_window for one in table.groups] == [WINDOW, None]
    assert len(table.pools) == (2 if options.separate or options.layer_major else 1)
    runner.warm_up()
    lines = [prompt.tolist() for prompt in prompts]
    done = [0] * len(lines)
    for index, line in enumerate(lines):
        cache.allocate(index, Need(0, 16, len(line) + NEW))
    while any(len(line) < len(prompt) + NEW for line, prompt in zip(lines, prompts, strict=True)):
        rows: list[BatchRow] = []
        for index, line in enumerate(lines):
            end = min(done[index] + 16, len(line))
            cache.reach(index, done[index], end)
            ids = np.array(line[done[index] : end], np.int64)
            rows.append(BatchRow(ids, done[index], cache.lists(index), GREEDY if end == len(line) else ()))
        for index, (row, drawn) in enumerate(zip(rows, runner.execute(rows), strict=True)):
            done[index] += len(row.token_ids)
            lines[index] += [one.token for one in drawn]
    for line, prompt, right in zip(lines, prompts, expected, strict=True):
        assert line[len(prompt) :][:NEW] == right
    if options.separate:
        assert (cache.lists(2)[0] == -1).sum() >= (77 - WINDOW) // BLOCK
        with pytest.raises(ValueError, match="block ids"):
            runner.execute([BatchRow(np.array([5]), 60, cache.lists(2), GREEDY)])
