"""Gather and scatter on a CUDA device: Triton kernels on a stream of their own, events instead of waiting.

what every request of a plan shares     RunPlaces  ─▶ int64[R, 8] on the device, kept
what a request adds                     PiecePlaces ─▶ int64[P, 6] on the device, by `prepare` or its first copy
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from kvtransfer.bounce import cuda_kernels
from kvtransfer.bounce.copying import FINISHED, Copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.packed import Packed, PackedGrid, PiecePlaces, RunPlaces

# Tables that are kept: of plans, and of transfers that are under way. The oldest ones are made again when more are.
_KEPT_RUNS, _KEPT_PIECES = 1024, 64
_LARGEST_TILE = 2048


class _Events:
    """A copy between two events of a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begin.record(stream)

    def launched(self) -> _Events:
        """Everything that the copy does is on the stream."""
        self._end.record(self._stream)
        return self

    def done(self) -> bool:
        return self._end.query()

    def seconds(self, noticed: float) -> float:
        """What the device has taken: when somebody looks says more about the processor."""
        return min(noticed, self._begin.elapsed_time(self._end) / 1e3)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs on the device. `bits`: bytes of all their addresses and sizes or'ed; `before` of the sizes that tokens
    multiply."""

    table: torch.Tensor
    bits: int
    before: int


@dataclass(frozen=True, slots=True)
class _Grid:
    """A grid on the device. `bits`: as of its runs, with where its buffers begin."""

    runs: _Runs
    pieces: torch.Tensor
    count: int
    bits: int


class CudaCopier:
    """One device. Launches go to a stream of their own; the caller has seen that the cache is written."""

    def __init__(self, device_id: int) -> None:
        self._device = torch.device("cuda", device_id)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._runs: OrderedDict[int, tuple[RunPlaces, _Runs]] = OrderedDict()
        self._grids: OrderedDict[int, tuple[Packed, list[_Grid]]] = OrderedDict()

    def can(self, packed: Packed) -> bool:
        return packed.whole_bytes

    def warm(self, runs: RunPlaces, *, gather: bool) -> None:
        with torch.cuda.stream(self._stream):
            there = self._runs_of(runs)
            piece = torch.zeros(6, dtype=torch.int64, device=self._device)
            for _, _, unit in runs.alike:
                # Of an empty range: compiled and loaded, and it copies nothing.
                how = _Launch.of(runs, unit, there.bits, gather=gather)
                how.run((1, 1), self._stream, there.table, piece, 0, 0, 0, 0, 1, 1, 0)

    def prepare(self, packed: Packed) -> None:
        self._of(packed)

    def gather(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        return self._copy(packed, begin, end, chunk, gather=True)

    def scatter(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        return self._copy(packed, begin, end, chunk, gather=False)

    def _copy(self, packed: Packed, begin: int, end: int, chunk: int, *, gather: bool) -> Copy:
        if begin >= end:
            return FINISHED
        grids = self._of(packed)
        # Entering a stream takes as long as a launch does: every call names it instead.
        if torch.cuda.current_device() != self._device.index:
            torch.cuda.set_device(self._device)
        events = _Events(self._stream)
        for grid, there in zip(packed.grids, grids, strict=True):
            launch(grid, there, (begin, end, chunk), gather=gather, stream=self._stream)
        return events.launched()

    def _of(self, packed: Packed) -> list[_Grid]:
        known = self._grids.get(id(packed))
        if known is None:
            with torch.cuda.stream(self._stream):
                made = [grid_on(self._device, grid, self._runs_of(grid.runs)) for grid in packed.grids]
            known = self._grids[id(packed)] = (packed, made)
            if len(self._grids) > _KEPT_PIECES:
                self._grids.popitem(last=False)
        return known[1]

    def _runs_of(self, runs: RunPlaces) -> _Runs:
        known = self._runs.get(id(runs))
        if known is None:
            known = self._runs[id(runs)] = (runs, runs_on(self._device, runs))
            if len(self._runs) > _KEPT_RUNS:
                self._runs.popitem(last=False)
        return known[1]


def runs_on(device: torch.device, runs: RunPlaces) -> _Runs:
    """The table of the runs that kernels read."""
    major = runs.token_major.astype(np.int64)
    columns = (runs.address, runs.stride, runs.step, runs.unit, runs.before, runs.row, runs.prefix, major)
    bits = _or([runs.address, runs.stride, runs.step >> 3, runs.unit >> 3, runs.row >> 3, runs.prefix >> 3])
    return _Runs(_upload(device, columns), bits, _or([runs.before >> 3]))


def grid_on(device: torch.device, grid: PackedGrid, runs: _Runs) -> _Grid:
    """What `launch` needs of a grid."""
    places: PiecePlaces = grid.pieces
    columns = (places.block, places.phase, places.begin, places.tokens, places.before, places.count)
    # A product is a multiple of the product of what its factors are multiples of.
    begins = (runs.before & -runs.before) * (grid.tokens & -grid.tokens)
    return _Grid(runs, _upload(device, columns), len(places.count), runs.bits | begins | grid.at)


def launch(
    grid: PackedGrid,
    there: _Grid,
    part: tuple[int, int, int],
    *,
    gather: bool,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copies the packed bytes [begin, end) of `part` between the cache and address `chunk`, one launch for each size
    of unit: one for a cache of one data type. `stream`: of the current device; None for the current one."""
    begin, end, chunk = part
    which = grid.inside(begin, end)
    bits = there.bits | begin | end | chunk
    for begins, ends, unit in grid.runs.alike:
        first, last = max(begins, which.start), min(ends, which.stop)
        if first >= last:
            continue
        how = _Launch.of(grid.runs, unit, bits, gather=gather)
        programs = ((last - first) * there.count, how.tiles)
        numbers = (chunk, begin, end, first, there.count, grid.tokens, 8 * grid.at)
        how.run(programs, stream, there.runs.table, there.pieces, *numbers)


class _Launch(NamedTuple):
    """What a kernel is compiled for. `unit`: elements of one token of a run, of `width` bytes. `tiles` of a piece."""

    unit: int
    width: int
    aligned: bool
    gather: bool
    tile: int
    tiles: int

    @classmethod
    def of(cls, runs: RunPlaces, unit: int, bits: int, *, gather: bool) -> _Launch:
        """For runs of `unit` bits. `bits`: bytes of everything that is added up to addresses, or'ed."""
        width = min(bits & -bits, 16)
        elements = (unit >> 3) // min(width, 8)
        # By the longest piece that there can be: kernels are compiled once for a plan, not for each request.
        longest = elements * runs.longest
        tile = min(_LARGEST_TILE, 1 << max(5, (longest - 1).bit_length()))
        return cls(elements, min(width, 8), width == 16, gather, tile, -(-longest // tile))

    def run(
        self,
        programs: tuple[int, int],
        stream: torch.cuda.Stream | None,
        runs: torch.Tensor,
        pieces: torch.Tensor,
        *numbers: int,
    ) -> None:
        """Launches. Triton's own call looks for the binary anew each time, by a key of all arguments, which takes
        several times as long as the launch: here it is known."""
        which = (runs.device.index, self)
        known = _COMPILED.get(which)
        constants = (self.unit, self.width, self.aligned, self.gather, self.tile)
        if known is not None:
            on = None if stream is None else stream.cuda_stream
            known[(*programs, 1)](runs, pieces, *numbers, *constants, stream=on)
            return
        kernel = cast("Any", cuda_kernels.copy_packed)  # pyright: ignore[reportUnknownMemberType]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            warps = 4 if self.tile >= 1024 else 1
            _COMPILED[which] = kernel[programs](runs, pieces, *numbers, *constants, num_warps=warps)


# By device. Triton's interpreter gives None: then it is asked each time.
_COMPILED: dict[tuple[int | None, _Launch], Any] = {}


def _upload(device: torch.device, columns: Sequence[NDArray[np.int64]]) -> torch.Tensor:
    rows = np.empty((len(columns[0]), len(columns)), np.int64)
    for number, column in enumerate(columns):
        rows[:, number] = column
    return torch.from_numpy(rows).to(device, non_blocking=True)  # pyright: ignore[reportUnknownMemberType]


def _or(columns: Sequence[NDArray[np.int64]]) -> int:
    value = 0
    for column in columns:
        value |= int(np.bitwise_or.reduce(column))
    return value
