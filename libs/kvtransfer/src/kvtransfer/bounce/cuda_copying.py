"""Gather and scatter on a CUDA device: Triton kernels on a stream of their own, events instead of waiting."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kvtransfer.bounce import cuda_kernels
from kvtransfer.bounce.copying import FINISHED, Copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.packed import Packed, PackedGrid

# Tables of transfers that are under way; the oldest ones are made again when more are.
_KEPT_TABLES = 64
_LARGEST_TILE = 2048


class _Events:
    """A copy that is over when its event has been reached."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()


class _Table:
    """A grid on the device: its columns, and what its launches share."""

    def __init__(self, grid: PackedGrid, device: torch.device) -> None:
        runs, pieces = grid.runs, grid.pieces
        major = runs.token_major.astype(np.int64)
        first = (runs.address, runs.stride, runs.step, runs.unit, runs.base, runs.row, runs.prefix, major)
        second = (pieces.block, pieces.phase, pieces.begin, pieces.tokens, pieces.before, pieces.count)
        rows = np.concatenate([np.stack(first, axis=1).reshape(-1), np.stack(second, axis=1).reshape(-1)])
        whole = torch.from_numpy(rows).to(  # pyright: ignore[reportUnknownMemberType]
            device, non_blocking=True
        )
        self.runs, self.pieces = whole[: 8 * len(runs.unit)], whole[8 * len(runs.unit) :]
        self.count, self.longest = len(pieces.count), int(pieces.count.max())
        self.bits = _or([runs.address, runs.stride, runs.step >> 3, runs.unit >> 3, runs.base >> 3, runs.row >> 3])
        self.bits |= _or([runs.prefix >> 3, (runs.end >> 3) - (runs.base >> 3)])


class CudaCopier:
    """One device. Launches go to a stream of their own; the caller has seen that the cache is written."""

    def __init__(self, device_id: int) -> None:
        self._device = torch.device("cuda", device_id)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._tables: OrderedDict[int, tuple[Packed, list[_Table]]] = OrderedDict()

    def can(self, packed: Packed) -> bool:
        return packed.whole_bytes

    def gather(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        return self._copy(packed, begin, end, chunk, gather=True)

    def scatter(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        return self._copy(packed, begin, end, chunk, gather=False)

    def _copy(self, packed: Packed, begin: int, end: int, chunk: int, *, gather: bool) -> Copy:
        if begin >= end:
            return FINISHED
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for grid, table in zip(packed.grids, self._of(packed), strict=True):
                launch(grid, table, (begin, end, chunk), gather=gather)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Events(event)

    def _of(self, packed: Packed) -> list[_Table]:
        known = self._tables.get(id(packed))
        if known is None:
            known = self._tables[id(packed)] = (packed, [_Table(grid, self._device) for grid in packed.grids])
            if len(self._tables) > _KEPT_TABLES:
                self._tables.popitem(last=False)
        return known[1]


def table_of(grid: PackedGrid, device: torch.device) -> _Table:
    """What `launch` needs of a grid."""
    return _Table(grid, device)


def launch(grid: PackedGrid, table: _Table, part: tuple[int, int, int], *, gather: bool) -> None:
    """Copies the packed bytes [begin, end) of `part` between the cache and address `chunk`, one launch for each size
    of unit: one for a cache of one data type."""
    begin, end, chunk = part
    which = grid.inside(begin, end)
    if not len(which):
        return
    bits = table.bits | begin | end | chunk
    width = min(bits & -bits, 16)
    kernel = cast("Any", cuda_kernels.copy_packed)  # pyright: ignore[reportUnknownMemberType]
    for run, count, unit in _same_units(grid.runs.unit[which], int(which[0])):
        elements = (unit >> 3) // min(width, 8)
        tile = min(_LARGEST_TILE, 1 << max(5, (elements * table.longest - 1).bit_length()))
        kernel[(count * table.count, -(-elements * table.longest // tile))](
            table.runs,
            table.pieces,
            chunk,
            begin,
            end,
            run,
            table.count,
            UNIT=elements,
            WIDTH=min(width, 8),
            ALIGNED=width == 16,
            GATHER=gather,
            TILE=tile,
            num_warps=4 if tile >= 1024 else 1,
        )


def _same_units(units: NDArray[np.int64], first: int) -> list[tuple[int, int, int]]:
    """(number of the first run, how many follow, unit) of neighbours with equal units."""
    cuts = np.flatnonzero(np.diff(units)) + 1
    begins = [0, *cuts.tolist()]
    ends = [*cuts.tolist(), len(units)]
    return [(first + a, b - a, int(units[a])) for a, b in zip(begins, ends, strict=True)]


def _or(columns: Sequence[NDArray[np.int64]]) -> int:
    value = 0
    for column in columns:
        value |= int(np.bitwise_or.reduce(column))
    return value
