"""Tokens cut where a block ends on either side: pieces that are contiguous in one source and one destination block.

source blocks of 4        |····|····|····|
destination blocks of 6   |······|······|
pieces                    |····|··|··|····|           phase = where in its block a piece begins, on either side
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.sharding import Shard
    from kvtransfer.windows import Window


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Piece i: `count[i]` tokens from local token `src[i]` of the source and `dst[i]` of the destination. int64[N]."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    count: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.count)


def cut(window: Window, prompt: int, src: Shard, src_block: int, dst: Shard, dst_block: int) -> Pieces:
    """Pieces of the window's tokens that both shards hold, in order. `prompt`: its length; blocks in tokens.

    Where only nobody's tokens can be hit (neither side sharded, so that local numbers are positions) the pieces grow to
    the border of a block: before the begin of the window down to its floor, and after the end of the prompt.
    """
    begin, end = window.begin, window.end
    if begin >= end:
        return Pieces(*(np.empty(0, np.int64) for _ in range(3)))
    if src.whole and dst.whole:
        begin = max(window.floor, begin // src_block * src_block, begin // dst_block * dst_block)
        if end == prompt:
            end = min(-(-end // src_block) * src_block, -(-end // dst_block) * dst_block)
        starts = _starts(begin, end, src_block)
        if src_block != dst_block:
            starts = np.union1d(starts, _starts(begin, end, dst_block))
        return Pieces(starts, starts, lengths(starts, end))
    cuts = (src.borders(begin, end, src_block, prompt), dst.borders(begin, end, dst_block, prompt))
    starts = np.unique(np.concatenate((np.array([begin], np.int64), *cuts)))
    count = lengths(starts, end)
    mine, yours = src.locals_of(starts, prompt), dst.locals_of(starts, prompt)
    both = (mine >= 0) & (yours >= 0)
    return Pieces(mine[both], yours[both], count[both])


def lengths(starts: NDArray[np.int64], end: int) -> NDArray[np.int64]:
    """Of the stretches that begin at `starts`, ascending and not empty; the last one goes up to `end`."""
    found = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=found[:-1])
    found[-1] = end - starts[-1]
    return found


def _starts(begin: int, end: int, block: int) -> NDArray[np.int64]:
    starts = np.arange(begin // block * block, end, block, dtype=np.int64)
    starts[0] = begin
    return starts
