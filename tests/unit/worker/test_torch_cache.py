"""The paged memory behind the torch runner: its description, its isolation between requests, its bounds."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from greedy_driver import GREEDY, GreedySequence, run_greedy
from isthmus_worker.runner import BatchRow, NonFiniteLogits
from isthmus_worker.torch_engine import ModelUnusable, TorchRunner
from isthmus_worker.torch_engine.attention.reads import split_by_length
from kvtransfer.page_table import MapperKind, MemoryKind, PageTable, entry_addresses
from tiny_models import tiny_llama, tiny_model

BLOCK = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def _memory(table: PageTable) -> NDArray[np.uint8]:
    """The registered bytes, by address, as a transfer agent sees them."""
    (region,) = table.regions
    return np.frombuffer((ctypes.c_uint8 * region.size_bytes).from_address(region.base_address), np.uint8)


def _ids(count: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(4, 320, count)


def _blocks(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, np.int32)


def test_page_table_describes_one_slot_major_pool(folder: Path) -> None:
    runner = TorchRunner(folder)
    table = runner.allocate_cache(10)
    table.validate()
    (region,), (pool,), (group,) = table.regions, table.pools, table.groups
    assert region.base_address % 4096 == 0
    assert region.memory_kind is MemoryKind.DRAM
    assert pool.slot_bytes == runner.describe().bytes_per_block
    assert (pool.num_slots, pool.layer_stride) == (10, 0)
    assert (group.global_layer_ids, group.tokens_per_block, group.sliding_window) == ((0, 1), BLOCK, None)
    assert [sorted(view.roles) for view in group.views] == [["key"], ["value"]]
    assert all(view.mapper_kind is MapperKind.HND and len(view.kv_heads) == 2 for view in group.views)
    assert sum(int(view.entries.size.sum()) for view in group.views) == pool.slot_bytes


def test_layers_with_another_window_are_another_group_of_the_same_pool(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    folder = tiny_model(
        tmp_path / "model", "Qwen2", num_hidden_layers=3, layer_types=types, use_sliding_window=True, sliding_window=24
    )
    runner = TorchRunner(folder)
    table = runner.allocate_cache(10)
    table.validate()
    (pool,), groups = table.pools, table.groups
    assert [(one.global_layer_ids, one.sliding_window) for one in groups] == [((0, 2), 24), ((1,), None)]
    memory = _memory(table).reshape(10, -1)
    runner.execute([BatchRow(_ids(BLOCK), 0, (_blocks(7),), GREEDY)])
    # Between them the groups describe every byte of a slot once.
    covered = np.zeros(pool.slot_bytes, int)
    for view in (view for group in groups for view in group.views):
        for offset, size in zip(view.entries.offset.tolist(), view.entries.size.tolist(), strict=True):
            covered[offset : offset + size] += 1
            assert memory[7, offset : offset + size].any()
    assert (covered == 1).all()


@pytest.mark.parametrize("window", [5, 16, 24, 37])
def test_bytes_outside_a_window_are_not_read(tmp_path: Path, window: int) -> None:
    """A peer may leave them unsent: they hold anything, NaN too."""
    folder = tiny_model(tmp_path / "model", "Mistral", sliding_window=window)
    prompts = {60: [2, 9, 4, 7, 11], 3: [1], 31: [0, 3, 6]}
    lines = [GreedySequence(_ids(n, n).tolist(), table) for n, table in prompts.items()]

    def after_hand_off(spoil: bool) -> list[list[int]]:
        runner = TorchRunner(folder)
        memory = _memory(runner.allocate_cache(12)).view(np.float32).reshape(12, 2, 2, 2, BLOCK, 16)
        rows = [GreedySequence(one.tokens[: one.prompt_len], one.blocks.tolist()) for one in lines]
        run_greedy(runner, rows, 1)
        for row in rows if spoil else []:
            for position in range(row.done - window + 1):
                memory[row.blocks[position // BLOCK], :, :, :, position % BLOCK] = np.nan
        # A chunk over the same positions, then decode rows of different lengths together.
        chunk = BatchRow(_ids(3), rows[0].done, (rows[0].blocks,), GREEDY)
        return [[one.token for one in runner.execute([chunk])[0]], *run_greedy(runner, rows, 12)]

    assert after_hand_off(spoil=True) == after_hand_off(spoil=False)


def test_cache_bytes_move_a_request_to_another_runner(folder: Path) -> None:
    """What the page table calls key and value of a layer is all that a peer needs, byte by byte."""
    context, generation = TorchRunner(folder), TorchRunner(folder)
    source, target = context.allocate_cache(8), generation.allocate_cache(8)
    context.warm_up()
    generation.warm_up()
    prompt = _ids(40).tolist()
    whole = GreedySequence(prompt, [5, 1, 7, 2])
    expected = run_greedy(context, [whole], 20)[0]

    first = TorchRunner(folder)
    moved = first.allocate_cache(8)
    prefill = GreedySequence(prompt, [5, 1, 7])
    run_greedy(first, [prefill], 1)
    for src_view, dst_view in zip(moved.groups[0].views, target.groups[0].views, strict=True):
        src_at, dst_at = (
            entry_addresses(moved.pools[0], src_view.entries),
            entry_addresses(target.pools[0], dst_view.entries),
        )
        for src, dst in zip((5, 1, 7), (0, 6, 3), strict=True):
            for a, b, size in zip(src_at, dst_at, src_view.entries.size, strict=True):
                stride = moved.pools[0].slot_stride
                ctypes.memmove(int(b) + dst * stride, int(a) + src * stride, int(size))
    decode = GreedySequence(prompt, [0, 6, 3, 4])
    decode.tokens += prefill.generated
    decode.done = len(prompt)
    assert run_greedy(generation, [decode], 20)[0] == expected
    assert source.regions != target.regions


def test_memory_is_zero_before_and_after_warm_up_and_does_not_move(folder: Path) -> None:
    runner = TorchRunner(folder)
    memory = _memory(runner.allocate_cache(6))
    assert not memory.any()
    runner.warm_up()
    assert not memory.any()
    run_greedy(runner, [GreedySequence(_ids(20).tolist(), [4, 2])], 3)
    slots = memory.reshape(6, -1).any(axis=1)
    assert slots.tolist() == [False, False, True, False, True, False]
    with pytest.raises(RuntimeError, match="before"):
        runner.allocate_cache(6)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_what_earlier_owners_left_in_a_block_does_not_matter(folder: Path, chunk: int) -> None:
    clean, dirty = TorchRunner(folder), TorchRunner(folder)
    clean.allocate_cache(16)
    memory = _memory(dirty.allocate_cache(16))
    memory[:] = 0xFF  # NaN in every float format
    prompts = [_ids(n, n).tolist() for n in (3, 16, 37, 21)]
    tables = ([15, 0], [3, 8], [1, 9, 4, 11], [14, 2, 6])

    def answers(runner: TorchRunner) -> list[list[int]]:
        return run_greedy(
            runner, [GreedySequence(p, table, chunk) for p, table in zip(prompts, tables, strict=True)], 14
        )

    expected = answers(clean)
    assert answers(dirty) == expected
    memory[:] = 0xFF  # the same blocks once more: nothing remembered from the first use may mislead
    assert answers(dirty) == expected


def test_a_block_that_a_transfer_filled_is_cleaned_behind_its_tokens(folder: Path) -> None:
    """The runner has written 5 tokens into block 3, then all of it; now a peer has written 5 tokens into it."""
    runner = TorchRunner(folder)
    memory = _memory(runner.allocate_cache(8)).view(np.float32).reshape(8, 2, 2, 2, BLOCK, 16)
    prompt = _ids(5)
    ((drawn,),) = runner.execute([BatchRow(prompt, 0, (_blocks(3),), GREEDY)])
    handed_off = memory[3].copy()
    runner.execute([BatchRow(_ids(40), 0, (_blocks(1, 3, 2),), GREEDY)])
    memory[3] = handed_off
    memory[3, :, :, :, 5:] = np.nan
    longer = BatchRow(np.array([7]), 40, (_blocks(1, 4, 2),), GREEDY)
    answers = runner.execute([longer, BatchRow(np.array([drawn.token]), 5, (_blocks(3),), GREEDY)])
    assert answers[1][0].token == run_greedy(runner, [GreedySequence(prompt.tolist(), [6])], 2)[0][1]


def test_a_row_without_finite_logits_is_named_and_the_others_are_good(folder: Path) -> None:
    runner = TorchRunner(folder)
    memory = _memory(runner.allocate_cache(8)).reshape(8, -1)
    good = [GreedySequence(_ids(n).tolist(), [block]) for n, block in ((9, 0), (5, 2))]
    bad = GreedySequence(_ids(7).tolist(), [1])
    run_greedy(runner, [good[0], bad, good[1]], 1)
    memory[1] = 0xFF
    with pytest.raises(NonFiniteLogits) as raised:
        runner.execute([good[0].row(), bad.row(), good[1].row()])
    assert raised.value.rows == [1]
    alone = [runner.execute([one.row()])[0] for one in good]
    assert raised.value.drawn == [alone[0], (), alone[1]]


def test_infinite_logits_are_no_answer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    # Every logit is the first hidden value times something huge: plus infinity for the even ids or for the odd ones.
    weights["lm_head.weight"][:] = 0
    weights["lm_head.weight"][::2, 0] = 3e38
    weights["lm_head.weight"][1::2, 0] = -3e38
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    runner = TorchRunner(folder)
    runner.allocate_cache(2)
    with pytest.raises(NonFiniteLogits):
        runner.execute([BatchRow(_ids(5), 0, (_blocks(0),), GREEDY)])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (BatchRow(_ids(0), 0, (_blocks(0),), GREEDY), r"\[0, 0\)"),
        (BatchRow(_ids(1), -1, (_blocks(0),), GREEDY), r"\[-1, 0\)"),
        (BatchRow(_ids(20), 0, (_blocks(0, 1),), GREEDY), r"\[0, 20\)"),
        (BatchRow(_ids(1), 18, (_blocks(0, 1),), GREEDY), r"\[18, 19\)"),
        (BatchRow(np.array([320]), 0, (_blocks(0),), GREEDY), "token ids"),
        (BatchRow(np.array([-1]), 0, (_blocks(0),), GREEDY), "token ids"),
        (BatchRow(_ids(17), 0, (_blocks(0),), GREEDY), "too few"),
        (BatchRow(_ids(1), 16, (_blocks(0),), GREEDY), "too few"),
        (BatchRow(_ids(17), 0, (_blocks(0, 4),), GREEDY), "block ids"),
        (BatchRow(_ids(1), 0, (_blocks(-1),), GREEDY), "block ids"),
    ],
)
def test_a_row_outside_cache_or_model_is_refused_and_writes_nothing(folder: Path, row: BatchRow, message: str) -> None:
    runner = TorchRunner(folder, max_model_len=18)
    memory = _memory(runner.allocate_cache(4))
    with pytest.raises(ValueError, match=message):
        runner.execute([BatchRow(_ids(3), 0, (_blocks(2),), GREEDY), row])
    assert not memory.any()


def test_max_model_len_bounds(folder: Path) -> None:
    assert TorchRunner(folder).describe().max_model_len == 4096
    assert TorchRunner(folder, max_model_len=100).describe().max_model_len == 100
    for asked in (0, 4097):
        with pytest.raises(ModelUnusable, match=f"engine.max_model_len = {asked}"):
            TorchRunner(folder, max_model_len=asked)


def test_padding_at_most_doubles_the_work() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = sorted(rng.integers(1, 5000, rng.integers(1, 65)).tolist(), reverse=True)
        groups = split_by_length(lengths)
        assert [i for begin, end in groups for i in range(begin, end)] == list(range(len(lengths)))
        for begin, end in groups:
            assert lengths[begin] <= max(256, 2 * lengths[end - 1])
    assert split_by_length([]) == []
