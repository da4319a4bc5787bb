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

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens`."""
        return -(-tokens // self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [begin, end) of the flat array, at positions [start, stop) of one sequence.

    `blocks` int32: those of the sequence from position 0 to `stop`.
    """

    begin: int
    end: int
    start: int
    blocks: NDArray[np.int32]

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `tokens`, `positions` int64[N]; `write_rows` int64[N * 2 * kv_heads] in the order (token, K V, head).

    `decode` are the spans of one token, `prefill` the others, both in the order of the flat array.
    `last` int64[W] is the flat index of each token whose logits are wanted; `wanted` int64[W] the row it answers.
    `write_blocks` int64[N]: the block of each token. `tail_blocks`, `tail_begin`, `tail_end` int64[R]: the last block
    of each row, and the interval of its tokens that this step writes.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    write_rows: NDArray[np.int64]
    write_blocks: NDArray[np.int64]
    decode: tuple[Span, ...]
    prefill: tuple[Span, ...]
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
    spans = [_span(rows[i], int(end), shape) for i, end in zip(order, ends, strict=True)]
    blocks = np.concatenate([one.blocks[positions[one.begin : one.end] // size] for one in spans]).astype(np.int64)
    want = np.array([bool(rows[i].draws) for i in order])
    tail_end = (starts + counts - 1) % size + 1
    return StepPlan(
        tokens=np.concatenate([rows[i].token_ids for i in order]),
        positions=positions,
        write_rows=_write_rows(blocks, positions % size, shape),
        write_blocks=blocks,
        decode=tuple(spans[: len(decode)]),
        prefill=tuple(spans[len(decode) :]),
        last=(ends - 1)[want],
        wanted=np.array(order, np.int64)[want],
        tail_blocks=blocks[ends - 1],
        tail_begin=np.maximum(tail_end - counts, 0),
        tail_end=tail_end,
    )


def _check(index: int, row: BatchRow, shape: CacheShape, vocab_size: int, max_model_len: int) -> None:
    count, tokens = len(row.token_ids), row.token_ids
    end = row.start + count
    if count == 0 or row.start < 0 or end > max_model_len:
        raise ValueError(f"row {index}: positions [{row.start}, {end}) must be some of [0, {max_model_len})")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"row {index}: token ids must lie in [0, {vocab_size})")
    used = row.blocks[: shape.blocks_for(end)]
    if len(used) * shape.tokens_per_block < end:
        raise ValueError(f"row {index}: {len(used)} blocks of {shape.tokens_per_block} tokens are too few for {end}")
    if used.min() < 0 or used.max() >= shape.num_blocks:
        raise ValueError(f"row {index}: block ids must lie in [0, {shape.num_blocks})")


def _span(row: BatchRow, end: int, shape: CacheShape) -> Span:
    count = len(row.token_ids)
    return Span(end - count, end, row.start, row.blocks[: shape.blocks_for(row.start + count)])


def _write_rows(blocks: NDArray[np.int64], offsets: NDArray[np.int64], shape: CacheShape) -> NDArray[np.int64]:
    first = blocks * (shape.runs_per_block * shape.tokens_per_block) + offsets
    return np.add.outer(first, np.arange(2 * shape.kv_heads) * shape.tokens_per_block).reshape(-1)
