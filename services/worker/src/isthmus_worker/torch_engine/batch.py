"""From the rows of one step to the index arrays that all layers of the model share. Pure numpy.

Tokens of a step lie in one flat array: first all rows of one token (decode), longest context first, then the longer
rows (prefill) one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_worker.runner import BatchRow

# Contexts this short are padded to each other whatever their ratio: another kernel call costs more.
_SHORT_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the numbering of runs and rows depends on."""

    num_blocks: int
    layers: int
    kv_heads: int
    tokens_per_block: int

    @property
    def runs_per_block(self) -> int:
        """Runs of a block: layers x (K, V) x heads."""
        return self.layers * 2 * self.kv_heads


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [begin, end) of the flat array, attended in one call over contexts padded to `blocks` blocks.

    `runs` int64[2 * rows * kv_heads * blocks] in the order (K V, row, head, block); `lengths` int64[rows].
    """

    begin: int
    end: int
    blocks: int
    runs: NDArray[np.int64]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Tokens [begin, end) of the flat array, at positions [start, start + end - begin) of their sequence.

    `runs` int64[2 * kv_heads * blocks] in the order (K V, head, block); None when start = 0: nothing is read back.
    """

    begin: int
    end: int
    start: int
    runs: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `tokens`, `positions` int64[N]; `write_rows` int64[N * 2 * kv_heads] in the order (token, K V, head).

    `last` int64[W] is the flat index of each token whose logits are wanted; `wanted` int64[W] the row it answers.
    `write_blocks` int64[N]: the block of each token. `tail_blocks`, `tail_begin`, `tail_end` int64[R]: the last block
    of each row, and the interval of its tokens that this step writes.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    write_rows: NDArray[np.int64]
    write_blocks: NDArray[np.int64]
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillRow, ...]
    last: NDArray[np.int64]
    wanted: NDArray[np.int64]
    tail_blocks: NDArray[np.int64]
    tail_begin: NDArray[np.int64]
    tail_end: NDArray[np.int64]


def plan_step(rows: list[BatchRow], shape: CacheShape, vocab_size: int, max_model_len: int) -> StepPlan:
    """Raises ValueError for a row that would read or write outside its blocks, the cache or the model."""
    for index, row in enumerate(rows):
        _check(index, row, shape, vocab_size, max_model_len)
    decode = sorted((i for i, row in enumerate(rows) if len(row.token_ids) == 1), key=lambda i: -rows[i].start)
    order = decode + [i for i, row in enumerate(rows) if len(row.token_ids) > 1]
    counts = np.array([len(rows[i].token_ids) for i in order], np.int64)
    ends = np.cumsum(counts)
    starts = np.array([rows[i].start for i in order], np.int64)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    size = shape.tokens_per_block
    blocks = np.concatenate(
        [rows[i].blocks[positions[end - n : end] // size] for i, end, n in zip(order, ends, counts, strict=True)]
    ).astype(np.int64)
    want = np.array([rows[i].want_token for i in order])
    tail_end = (starts + counts - 1) % size + 1
    return StepPlan(
        tokens=np.concatenate([rows[i].token_ids for i in order]),
        positions=positions,
        write_rows=_write_rows(blocks, positions % size, shape),
        write_blocks=blocks,
        decode=_decode_groups([rows[i] for i in decode], shape),
        prefill=tuple(
            _prefill_row(rows[i], int(end), shape)
            for i, end in zip(order[len(decode) :], ends[len(decode) :], strict=True)
        ),
        last=(ends - 1)[want],
        wanted=np.array(order, np.int64)[want],
        tail_blocks=blocks[ends - 1],
        tail_begin=np.maximum(tail_end - counts, 0),
        tail_end=tail_end,
    )


def split_by_length(lengths: list[int]) -> list[tuple[int, int]]:
    """Cuts descending lengths into intervals, so that padding to the first of each at most doubles the work."""
    groups: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or (lengths[begin] > _SHORT_CONTEXT and lengths[i] * 2 < lengths[begin]):
            groups.append((begin, i))
            begin = i
    return groups


def _check(index: int, row: BatchRow, shape: CacheShape, vocab_size: int, max_model_len: int) -> None:
    count, tokens = len(row.token_ids), row.token_ids
    end = row.start + count
    if count == 0 or row.start < 0 or end > max_model_len:
        raise ValueError(f"row {index}: positions [{row.start}, {end}) must be some of [0, {max_model_len})")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"row {index}: token ids must lie in [0, {vocab_size})")
    used = row.blocks[: _blocks_for(end, shape)]
    if len(used) * shape.tokens_per_block < end:
        raise ValueError(f"row {index}: {len(used)} blocks of {shape.tokens_per_block} tokens are too few for {end}")
    if used.min() < 0 or used.max() >= shape.num_blocks:
        raise ValueError(f"row {index}: block ids must lie in [0, {shape.num_blocks})")


def _blocks_for(tokens: int, shape: CacheShape) -> int:
    return -(-tokens // shape.tokens_per_block)


def _write_rows(blocks: NDArray[np.int64], offsets: NDArray[np.int64], shape: CacheShape) -> NDArray[np.int64]:
    first = blocks * (shape.runs_per_block * shape.tokens_per_block) + offsets
    return np.add.outer(first, np.arange(2 * shape.kv_heads) * shape.tokens_per_block).reshape(-1)


def _decode_groups(rows: list[BatchRow], shape: CacheShape) -> tuple[DecodeGroup, ...]:
    groups: list[DecodeGroup] = []
    for begin, end in split_by_length([row.start + 1 for row in rows]):
        members = rows[begin:end]
        width = _blocks_for(members[0].start + 1, shape)
        table = np.empty((end - begin, width), np.int64)
        for i, row in enumerate(members):
            used = _blocks_for(row.start + 1, shape)
            table[i, :used] = row.blocks[:used]
            # Padding reads a block of the row itself: never another request's memory.
            table[i, used:] = row.blocks[0]
        lengths = np.array([row.start + 1 for row in members], np.int64)
        groups.append(DecodeGroup(begin, end, width, _runs(table, shape), lengths))
    return tuple(groups)


def _prefill_row(row: BatchRow, end: int, shape: CacheShape) -> PrefillRow:
    count = len(row.token_ids)
    runs = None
    if row.start > 0:
        runs = _runs(row.blocks[None, : _blocks_for(row.start + count, shape)].astype(np.int64), shape)
    return PrefillRow(end - count, end, row.start, runs)


def _runs(table: NDArray[np.int64], shape: CacheShape) -> NDArray[np.int64]:
    """Runs of blocks[rows, width] in the order (K V, row, head, block)."""
    heads = np.arange(2 * shape.kv_heads, dtype=np.int64).reshape(2, 1, shape.kv_heads, 1)
    return (table[None, :, None, :] * shape.runs_per_block + heads).reshape(-1)
