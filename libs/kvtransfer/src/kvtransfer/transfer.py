"""The addresses of one request, in three sizes: factored (runs x pieces), strided (per run and piece), or every run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.regions import RegionPairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """R runs x N pieces of blocks, nothing multiplied out: run r of piece p moves `length[p]` bytes `count[p]` times
    from src[r] + src_off[p] to dst[r] + dst_off[p], `src_step` and `dst_step` bytes apart. int64 arrays."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    src_off: NDArray[np.int64]
    dst_off: NDArray[np.int64]
    length: NDArray[np.int64]
    count: NDArray[np.int64]
    src_step: int = 0
    dst_step: int = 0

    @property
    def strided(self) -> bool:
        """True when a run repeats within a piece."""
        return self.src_step != 0

    @property
    def fragments(self) -> int:
        """Contiguous runs."""
        return len(self.src) * int(self.count.sum())

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return len(self.src) * int(np.dot(self.length, self.count))

    def unrolled(self) -> Grid:
        """The same with a piece for every repetition."""
        if not self.strided:
            return self
        which = np.repeat(np.arange(len(self.count)), self.count)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        src_off, dst_off = self.src_off[which] + nth * self.src_step, self.dst_off[which] + nth * self.dst_step
        return Grid(self.src, self.dst, src_off, dst_off, self.length[which], np.ones_like(nth))


@dataclass(frozen=True, slots=True, eq=False)
class StridedRuns:
    """Row i moves `unit[i]` bytes `count[i]` times from src[i] to dst[i], `*_step[i]` bytes apart. int64[N]. What a
    gather kernel takes, and NIXL's five-column descriptors (address, length, device, stride, count)."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    unit: NDArray[np.int64]
    count: NDArray[np.int64]
    src_step: NDArray[np.int64]
    dst_step: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.src)

    def pairs(self) -> RegionPairs:
        """Every run."""
        which = np.repeat(np.arange(len(self)), self.count)
        nth = np.arange(len(which)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        src, dst = (
            start[which] + nth * step[which] for start, step in ((self.src, self.src_step), (self.dst, self.dst_step))
        )
        return RegionPairs(src, dst, self.unit[which])


@dataclass(frozen=True, eq=False)
class Transfer:
    """One request between two ranks. `region_starts` (source, destination), sorted int64: given when joining runs must
    look at every address because slots of one pool lie in several registered regions."""

    grids: tuple[Grid, ...]
    region_starts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    @cached_property
    def nbytes(self) -> int:
        """Bytes moved."""
        return sum(grid.nbytes for grid in self.grids)

    @cached_property
    def fragments(self) -> int:
        """Runs of `pairs()`, without making them. An upper bound when `region_starts` is given."""
        return sum(grid.fragments for grid in self.grids)

    def pairs(self) -> RegionPairs:
        """Every run: 24 bytes each here, and 48 more in what NIXL takes (two arrays of three int64)."""
        total = self.fragments
        # One allocation: the C library gives the memory of several back to the system each time, and takes it anew.
        src, dst = np.empty((2, total), np.int64)
        length = self._one_length(total)
        at = 0
        for grid in self.grids:
            flat = grid.unrolled()
            shape = (len(flat.src), len(flat.src_off))
            to = at + shape[0] * shape[1]
            np.add.outer(flat.src, flat.src_off, out=src[at:to].reshape(shape))
            np.add.outer(flat.dst, flat.dst_off, out=dst[at:to].reshape(shape))
            if length.strides[0]:
                length[at:to].reshape(shape)[:] = flat.length
            at = to
        pairs = RegionPairs(src, dst, length)
        return pairs if self.region_starts is None else _join(pairs, *self.region_starts)

    def _one_length(self, total: int) -> NDArray[np.int64]:
        """The lengths of all runs; no memory for each when all are equal, as they mostly are, else room for them."""
        lengths = [grid.length for grid in self.grids if len(grid.length)]
        low, high = (
            (min(int(one.min()) for one in lengths), max(int(one.max()) for one in lengths)) if lengths else (0, 1)
        )
        return np.broadcast_to(np.int64(low), total) if low == high else np.empty(total, np.int64)

    def strided(self) -> StridedRuns:
        """One row for each (run, piece): never one for each token."""
        parts: list[StridedRuns] = []
        for grid in self.grids:
            shape = (len(grid.src), len(grid.src_off))
            rows = shape[0] * shape[1]
            parts.append(
                StridedRuns(
                    np.add.outer(grid.src, grid.src_off).reshape(rows),
                    np.add.outer(grid.dst, grid.dst_off).reshape(rows),
                    np.broadcast_to(grid.length, shape).reshape(rows),
                    np.broadcast_to(grid.count, shape).reshape(rows),
                    np.full(rows, grid.src_step, np.int64),
                    np.full(rows, grid.dst_step, np.int64),
                )
            )
        return join_strided(parts)


def join_strided(parts: Sequence[StridedRuns]) -> StridedRuns:
    """All rows."""
    none = np.empty(0, np.int64)
    return StridedRuns(
        *(np.concatenate([none, *(getattr(part, field.name) for part in parts)]) for field in fields(StridedRuns))
    )


def _join(pairs: RegionPairs, src_starts: NDArray[np.int64], dst_starts: NDArray[np.int64]) -> RegionPairs:
    """Joins runs that follow each other on both sides and do not meet at the border of a registered region."""
    if len(pairs) < 2:
        return pairs
    order = np.argsort(pairs.src, kind="stable")
    src, dst, length = pairs.src[order], pairs.dst[order], pairs.lengths[order]
    joined = (src[:-1] + length[:-1] == src[1:]) & (dst[:-1] + length[:-1] == dst[1:])
    for starts, addresses in ((src_starts, src), (dst_starts, dst)):
        region = np.searchsorted(starts, addresses, side="right")
        joined &= region[:-1] == region[1:]
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return RegionPairs(src[first], dst[first], np.add.reduceat(length, first))
