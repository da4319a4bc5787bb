"""What attention reads back from the cache in one step, as index arrays. Pure numpy.

A window makes the read begin at the block of the first position that is seen; the positions in front of it in that
block are masked. `window`: how many positions a token sees, its own included; None = all before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_worker.torch_engine.batch import ListShape, Span

# Contexts this short are padded to each other whatever their ratio: another kernel call costs more.
_SHORT_CONTEXT = 256


@dataclass(frozen=True, slots=True)
class DecodeRead:
    """Rows [begin, end) of the flat array, attended in one call over contexts padded to each other.

    `runs`: see `_runs`. Of the gathered tokens row i sees
    [low[i], high[i]), int64[rows].
    """

    begin: int
    end: int
    runs: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefillRead:
    """Tokens [begin, end) of the flat array, at positions [start, stop) of their sequence.

    `runs` (see `_runs`), the first of its tokens at position `first`;
    None when start = 0: nothing is read back. No token sees a position before `low`.
    """

    begin: int
    end: int
    start: int
    stop: int
    first: int
    low: int
    runs: NDArray[np.int64] | None


def decode_reads(spans: tuple[Span, ...], shape: ListShape, window: int | None) -> tuple[DecodeRead, ...]:
    """`spans`: of one token each, longest context first."""
    seen = [one.stop if window is None else min(one.stop, window) for one in spans]
    return tuple(_decode_read(spans[begin:end], shape, window) for begin, end in split_by_length(seen))


def prefill_read(span: Span, shape: ListShape, window: int | None) -> PrefillRead:
    """One chunk of a prompt."""
    low = 0 if window is None else max(0, span.start - window + 1)
    block = low // shape.tokens_per_block
    runs = None if span.start == 0 else _runs(span.blocks[None, block:].astype(np.int64), shape)
    first = block * shape.tokens_per_block
    return PrefillRead(span.begin, span.end, span.start, span.stop, first, low, runs)


def split_by_length(lengths: list[int]) -> list[tuple[int, int]]:
    """Cuts descending lengths into intervals, so that padding to the first of each at most doubles the work."""
    groups: list[tuple[int, int]] = []
    begin = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or (lengths[begin] > _SHORT_CONTEXT and lengths[i] * 2 < lengths[begin]):
            groups.append((begin, i))
            begin = i
    return groups


def _decode_read(spans: tuple[Span, ...], shape: ListShape, window: int | None) -> DecodeRead:
    high = np.array([one.stop for one in spans], np.int64)
    low = np.zeros_like(high) if window is None else np.maximum(high - window, 0)
    first = low // shape.tokens_per_block
    counts = np.array([len(one.blocks) for one in spans]) - first
    table = np.empty((len(spans), counts.max()), np.int64)
    for row, (one, block, count) in enumerate(zip(spans, first.tolist(), counts.tolist(), strict=True)):
        table[row, :count] = one.blocks[block:]
        # Padding reads a block of the row itself: never another request's memory.
        table[row, count:] = one.blocks[block]
    offset = first * shape.tokens_per_block
    return DecodeRead(spans[0].begin, spans[-1].end, _runs(table, shape), low - offset, high - offset)


def _runs(table: NDArray[np.int64], shape: ListShape) -> NDArray[np.int64]:
    """Runs of blocks[rows, width] in the order (K V, row, head, block), (K V, row, block) where tokens come first."""
    if shape.nhd:
        per_block = shape.block_rows // (shape.kv_heads * shape.tokens_per_block)
        halves = np.arange(2, dtype=np.int64).reshape(2, 1, 1)
        return (table[None] * per_block + halves).reshape(-1)
    heads = np.arange(2 * shape.kv_heads, dtype=np.int64).reshape(2, 1, shape.kv_heads, 1)
    return (table[None, :, None, :] * (shape.block_rows // shape.tokens_per_block) + heads).reshape(-1)
