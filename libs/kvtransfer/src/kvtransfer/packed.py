"""A packed range and where its bytes lie on one side: factored (runs x pieces), written out only part by part.

    packed bit of run r in piece p, head-major buffer    base + row * begin + prefix * tokens + unit * before
                                    token-major buffer   base + row * (begin + before) + prefix
    base = 8 * where the group begins + tokens of the group * bits of a token in the buffers before the run's

A chunk of a bounced transfer is any byte range of it: the sender cuts, the receiver follows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.transfer import StridedRuns, join_strided

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class RunPlaces:
    """Columns of R runs in packed order, the same for every request of a plan. `address`, `stride` (slot to slot) in
    bytes; `step` (token to token in a block) and `unit` in bits. Of one token, in bits: `before`, the buffers before
    the run's; `row`, the run's buffer; `prefix`, the runs of that buffer before this one. `token_major`: how the buffer
    is laid out. `layer`: global number of the buffer's. `longest`: tokens of a piece at most."""

    address: NDArray[np.int64]
    stride: NDArray[np.int64]
    step: NDArray[np.int64]
    unit: NDArray[np.int64]
    before: NDArray[np.int64]
    row: NDArray[np.int64]
    prefix: NDArray[np.int64]
    token_major: NDArray[np.bool_]
    layer: NDArray[np.int64]
    longest: int

    @cached_property
    def after(self) -> NDArray[np.int64]:
        """`before` of the next buffer."""
        return self.before + self.row

    @cached_property
    def whole_bytes(self) -> bool:
        """True when every token of every run is made of whole bytes."""
        return not (self.unit & 7).any()

    @cached_property
    def alike(self) -> tuple[tuple[int, int, int], ...]:
        """(first run, run after the last, unit) of neighbours with equal units."""
        cuts = (np.flatnonzero(np.diff(self.unit)) + 1).tolist()
        return tuple((a, b, int(self.unit[a])) for a, b in itertools.pairwise([0, *cuts, len(self.unit)]))


@dataclass(frozen=True, slots=True, eq=False)
class PiecePlaces:
    """Columns of P pieces of blocks, in tokens: the slot, where in it the piece begins, tokens packed before its
    destination block, tokens of that block, those of it before the piece, and its own."""

    block: NDArray[np.int64]
    phase: NDArray[np.int64]
    begin: NDArray[np.int64]
    tokens: NDArray[np.int64]
    before: NDArray[np.int64]
    count: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackedGrid:
    """R runs x P pieces of a group of which `tokens` tokens are packed from byte `at` on. `reads`: addresses are those
    of the source (a gather), otherwise of the destination."""

    runs: RunPlaces
    pieces: PiecePlaces
    tokens: int
    at: int
    reads: bool

    @property
    def fragments(self) -> int:
        """Contiguous runs of a token, an upper bound of what is copied."""
        return len(self.runs.unit) * int(self.pieces.count.sum())

    def inside(self, begin: int, end: int) -> slice:
        """Runs whose buffer meets the packed bytes [begin, end)."""
        low, high = 8 * (begin - self.at) // self.tokens, -(8 * (self.at - end) // self.tokens)
        first = int(np.searchsorted(self.runs.after, low, side="right"))
        return slice(first, max(first, int(np.searchsorted(self.runs.before, high, side="left"))))

    def rows(self, which: slice) -> StridedRuns:
        """The runs `which`, one row for each (run, piece); tokens that follow each other on both ends are one."""
        runs, pieces = self.runs, self.pieces
        unit, step, stride = runs.unit[which], runs.step[which], runs.stride[which]
        base = 8 * self.at + runs.before[which] * self.tokens
        row, prefix, major = runs.row[which], runs.prefix[which], runs.token_major[which]
        head_major = np.outer(row, pieces.begin) + np.outer(prefix, pieces.tokens) + np.outer(unit, pieces.before)
        token_major = np.outer(row, pieces.begin + pieces.before) + prefix[:, None]
        offset = (base[:, None] + np.where(major[:, None], token_major, head_major)) >> 3
        address = runs.address[which][:, None] + np.outer(stride, pieces.block) + (np.outer(step, pieces.phase) >> 3)
        hop = np.where(major, row, unit)
        solid = (unit == step) & (unit == hop)
        shape = offset.shape
        length = np.where(solid[:, None], np.outer(unit, pieces.count), unit[:, None]) >> 3
        count = np.where(solid[:, None], 1, pieces.count[None, :])
        hops = [np.broadcast_to(np.where(solid, 0, one >> 3)[:, None], shape) for one in (step, hop)]
        ends = (address, offset) if self.reads else (offset, address)
        if not self.reads:
            hops.reverse()
        columns = (*ends, length, count, *hops)
        return StridedRuns(*(np.ascontiguousarray(column).reshape(-1) for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """`nbytes` packed bytes of one chunk of one request between two ranks."""

    grids: tuple[PackedGrid, ...]
    nbytes: int

    @property
    def fragments(self) -> int:
        """Contiguous runs of a token, an upper bound of what is copied."""
        return sum(grid.fragments for grid in self.grids)

    @property
    def whole_bytes(self) -> bool:
        """True when every token of every run is made of whole bytes, and so are all steps."""
        return all(grid.runs.whole_bytes for grid in self.grids)

    def layers(self) -> NDArray[np.int64]:
        """[buffers, 3]: begin and end in packed bits, and global layer, in packed order."""
        columns = [
            np.stack((8 * one.at + runs.before * one.tokens, 8 * one.at + runs.after * one.tokens, runs.layer), axis=1)
            for one in self.grids
            for runs in (one.runs,)
        ]
        return np.unique(np.concatenate(columns), axis=0) if columns else np.zeros((0, 3), np.int64)

    def part(self, begin: int, end: int) -> StridedRuns:
        """The packed bytes [begin, end): packed offsets count from `begin`."""
        rows = [_clip(grid.rows(grid.inside(begin, end)), begin, end, reads=grid.reads) for grid in self.grids]
        return join_strided(rows)


def _clip(rows: StridedRuns, begin: int, end: int, *, reads: bool) -> StridedRuns:
    """What of the rows lies in [begin, end): rows that a border cuts are written out, one for each token."""
    offset, step = (rows.dst, rows.dst_step) if reads else (rows.src, rows.src_step)
    last = offset + (rows.count - 1) * step + rows.unit
    whole = (offset >= begin) & (last <= end)
    cut = np.flatnonzero(~whole & (offset < end) & (last > begin))
    kept = _shifted(_take(rows, np.flatnonzero(whole)), begin, reads=reads)
    if not len(cut):
        return kept
    pairs = _take(rows, cut).pairs()
    src, dst, length = pairs.src, pairs.dst, np.array(pairs.lengths)
    offset = dst if reads else src
    skip = np.maximum(0, begin - offset)
    left = np.minimum(end, offset + length) - offset - skip
    chosen = left > 0
    one, none = np.ones(int(chosen.sum()), np.int64), np.zeros(int(chosen.sum()), np.int64)
    pieces = StridedRuns((src + skip)[chosen], (dst + skip)[chosen], left[chosen], one, none, none)
    return join_strided([kept, _shifted(pieces, begin, reads=reads)])


def _take(rows: StridedRuns, which: NDArray[np.intp]) -> StridedRuns:
    columns = (rows.src, rows.dst, rows.unit, rows.count, rows.src_step, rows.dst_step)
    return StridedRuns(*(column[which] for column in columns))


def _shifted(rows: StridedRuns, begin: int, *, reads: bool) -> StridedRuns:
    src, dst = (rows.src, rows.dst - begin) if reads else (rows.src - begin, rows.dst)
    return StridedRuns(src, dst, rows.unit, rows.count, rows.src_step, rows.dst_step)
