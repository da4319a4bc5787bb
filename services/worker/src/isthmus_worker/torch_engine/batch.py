"""From the rows of one step to the index arrays that all layers of the model share. Pure numpy.

Tokens of a step lie in one flat array: first all rows of one token (decode), longest context first, then the longer
rows (prefill) one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isthmus_worker.runner import draw_points

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from isthmus_worker.runner import BatchRow


@dataclass(frozen=True, slots=True)
class ListShape:
    """What the numbering of runs and rows of one block list depends on. `block_rows`: rows from one block of a layer to
    the next; `nhd`: tokens come before heads. `window`: what layers see of the list; None: every block is there."""

    num_blocks: int
    block_rows: int
    kv_heads: int
    tokens_per_block: int
    nhd: bool = False
    window: int | None = None

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens`."""
        return -(-tokens // self.tokens_per_block)

    def first_block(self, start: int) -> int:
        """The first block that a token at position `start` needs."""
        return 0 if self.window is None else max(0, start - self.window + 1) // self.tokens_per_block


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
class ListPlan:
    """What one block list takes in a step. `write_rows` int64[N * 2 * kv_heads] in the order (token, K V, head).

    `decode` are the spans of one token, `prefill` the others, both in the order of the flat array.
    `write_blocks` int64[N]: the block of each token; `tail_blocks` int64[R]: the last one of each row.
    """

    write_rows: NDArray[np.int64]
    write_blocks: NDArray[np.int64]
    decode: tuple[Span, ...]
    prefill: tuple[Span, ...]
    tail_blocks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `tokens`, `positions` int64[N]; `lists`: one for each block list of the cache.

    `last` int64[W]: flat index of each token whose logits are wanted; `wanted` int64[W]: the row it answers.
    `tail_begin`, `tail_end` int64[R]: the interval of tokens that this step writes in the last block of each row.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    lists: tuple[ListPlan, ...]
    last: NDArray[np.int64]
    wanted: NDArray[np.int64]
    tail_begin: NDArray[np.int64]
    tail_end: NDArray[np.int64]


def step_order(rows: Sequence[BatchRow]) -> list[int]:
    """Indexes of the rows in the order of the flat array."""
    decode = sorted((i for i, row in enumerate(rows) if len(row.token_ids) == 1), key=lambda i: -rows[i].start)
    return decode + [i for i, row in enumerate(rows) if len(row.token_ids) > 1]


def wanted_tokens(rows: Sequence[BatchRow], order: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(`last`, `wanted`) of rows in that order: see StepPlan. One entry for each of `draw_points` of each row."""
    last: list[int] = []
    wanted: list[int] = []
    end = 0
    for index in order:
        row = rows[index]
        for point in draw_points(row):
            last.append(end + len(point.token_ids) - 1)
            wanted.append(index)
        end += len(row.token_ids)
    return np.array(last, np.int64), np.array(wanted, np.int64)


def plan_step(rows: list[BatchRow], shapes: Sequence[ListShape], vocab_size: int, max_model_len: int) -> StepPlan:
    """Raises ValueError for a row that would read or write outside its blocks, the cache or the model."""
    for index, row in enumerate(rows):
        _check(index, row, shapes, vocab_size, max_model_len)
    order = step_order(rows)
    counts = np.array([len(rows[i].token_ids) for i in order], np.int64)
    starts = np.array([rows[i].start for i in order], np.int64)
    ends = np.cumsum(counts)
    positions = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    size = shapes[0].tokens_per_block
    last, wanted = wanted_tokens(rows, order)
    tail_end = (starts + counts - 1) % size + 1
    in_order = [rows[i] for i in order]
    return StepPlan(
        tokens=np.concatenate([row.token_ids for row in in_order]),
        positions=positions,
        lists=tuple(_plan_list(in_order, number, shape, ends, positions) for number, shape in enumerate(shapes)),
        last=last,
        wanted=wanted,
        tail_begin=np.maximum(tail_end - counts, 0),
        tail_end=tail_end,
    )


def _plan_list(
    rows: Sequence[BatchRow], number: int, shape: ListShape, ends: NDArray[np.int64], positions: NDArray[np.int64]
) -> ListPlan:
    size = shape.tokens_per_block
    spans = [_span(row, number, int(end), shape) for row, end in zip(rows, ends, strict=True)]
    blocks = np.concatenate([one.blocks[positions[one.begin : one.end] // size] for one in spans]).astype(np.int64)
    decodes = sum(len(row.token_ids) == 1 for row in rows)
    return ListPlan(
        write_rows=_write_rows(blocks, positions % size, shape),
        write_blocks=blocks,
        decode=tuple(spans[:decodes]),
        prefill=tuple(spans[decodes:]),
        tail_blocks=blocks[ends - 1],
    )


def _check(index: int, row: BatchRow, shapes: Sequence[ListShape], vocab_size: int, max_model_len: int) -> None:
    count, tokens = len(row.token_ids), row.token_ids
    end = row.start + count
    if count == 0 or row.start < 0 or end > max_model_len:
        raise ValueError(f"row {index}: positions [{row.start}, {end}) must be some of [0, {max_model_len})")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"row {index}: token ids must lie in [0, {vocab_size})")
    if len(row.blocks) != len(shapes):
        raise ValueError(f"row {index}: {len(row.blocks)} block lists, the cache has {len(shapes)}")
    for blocks, shape in zip(row.blocks, shapes, strict=True):
        used = blocks[: shape.blocks_for(end)]
        if len(used) * shape.tokens_per_block < end:
            raise ValueError(
                f"row {index}: {len(used)} blocks of {shape.tokens_per_block} tokens are too few for {end}"
            )
        used = used[shape.first_block(row.start) :]
        if used.min() < 0 or used.max() >= shape.num_blocks:
            raise ValueError(f"row {index}: block ids must lie in [0, {shape.num_blocks})")


def _span(row: BatchRow, number: int, end: int, shape: ListShape) -> Span:
    count = len(row.token_ids)
    return Span(end - count, end, row.start, row.blocks[number][: shape.blocks_for(row.start + count)])


def _write_rows(blocks: NDArray[np.int64], offsets: NDArray[np.int64], shape: ListShape) -> NDArray[np.int64]:
    heads, tokens = shape.kv_heads, shape.tokens_per_block
    by_head, by_token = (1, heads) if shape.nhd else (tokens, 1)
    inner = np.add.outer(np.arange(2) * heads * tokens, np.arange(heads) * by_head).reshape(-1)
    return np.add.outer(blocks * shape.block_rows + offsets * by_token, inner).reshape(-1)
