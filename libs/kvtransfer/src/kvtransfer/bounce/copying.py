"""Copies of strided runs inside one process: what gathers fragments into a chunk and scatters a chunk into pages.

gather    pages ─ rows, addresses of the cache -> packed offset ─▶ chunk
scatter   chunk ─ rows, packed offset -> addresses of the cache ─▶ pages
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.packed import Packed, RunPlaces
    from kvtransfer.transfer import StridedRuns

# Index entries made at once: bounds the memory that a copy of very many small runs takes.
_AT_ONCE = 1 << 20


class Copy(Protocol):
    """A copy that has been started."""

    def done(self) -> bool:
        """True when every byte is there. Never waits."""
        ...

    def seconds(self, noticed: float) -> float:
        """What a copy that is done has taken. `noticed`: seconds until somebody saw that it was."""
        ...


class Copier(Protocol):
    """Copies between the cache and an arena of the same device. Used by the thread that owns the agent only."""

    def can(self, packed: Packed) -> bool:
        """True when it can copy any part of it. The same on both sides of a transfer."""
        ...

    def warm(self, runs: RunPlaces, *, gather: bool) -> None:
        """Makes what every copy of such runs needs, so that the first request of a plan does not wait for it."""
        ...

    def prepare(self, packed: Packed) -> None:
        """Makes what copies of its parts need, so that the first one does not have to. Optional."""
        ...

    def gather(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        """Starts copying the packed bytes [begin, end) from the cache to address `chunk`."""
        ...

    def scatter(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        """Starts copying the packed bytes [begin, end) from address `chunk` to the cache."""
        ...


class HostCopier:
    """Host memory: the copy is over when the call returns."""

    def can(self, packed: Packed) -> bool:
        return packed.nbytes >= 0

    def warm(self, runs: RunPlaces, *, gather: bool) -> None:
        """Nothing is kept between requests."""

    def prepare(self, packed: Packed) -> None:
        """Rows are made of every part anew: all of them at once may be very many."""

    def gather(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        rows = packed.part(begin, end)
        copy_rows(rows.src, rows.dst + chunk, rows)
        return FINISHED

    def scatter(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        rows = packed.part(begin, end)
        copy_rows(rows.src + chunk, rows.dst, rows)
        return FINISHED


class _Finished:
    def done(self) -> bool:
        return True

    def seconds(self, noticed: float) -> float:
        return noticed


FINISHED: Copy = _Finished()


def copy_rows(src: NDArray[np.int64], dst: NDArray[np.int64], rows: StridedRuns) -> None:
    """Copies `rows`, with these absolute host addresses in place of theirs. Rows must not overlap."""
    if not len(rows):
        return
    columns = (rows.unit, rows.count, rows.src_step, rows.dst_step)
    if all((column == column[0]).all() for column in columns):
        unit, count, src_step, dst_step = (int(column[0]) for column in columns)
        _copy_alike(src, dst, (unit, count, src_step, dst_step))
        return
    kinds, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    which = which.reshape(-1)
    for number, (unit, count, src_step, dst_step) in enumerate(kinds.tolist()):
        chosen = np.flatnonzero(which == number)
        _copy_alike(src[chosen], dst[chosen], (unit, count, src_step, dst_step))


def _copy_alike(src: NDArray[np.int64], dst: NDArray[np.int64], shape: tuple[int, int, int, int]) -> None:
    """Rows of one shape, as elements as wide as all their addresses and steps allow."""
    unit, count, src_step, dst_step = shape
    src, dst = _spread(src, count, src_step), _spread(dst, count, dst_step)
    low_src, low_dst = int(src.min()), int(dst.min())
    width = _width(src - low_src, dst - low_dst, unit)
    per = unit // width
    # Few wide rows: one call each costs less than an index.
    if per > 64 and width < 256:
        for a, b in zip(src.tolist(), dst.tolist(), strict=True):
            ctypes.memmove(b, a, unit)
        return
    step = max(1, _AT_ONCE // per)
    for at in range(0, len(src), step):
        _copy_elements(src[at : at + step], dst[at : at + step], low_src, low_dst, width, per)


def _width(src: NDArray[np.int64], dst: NDArray[np.int64], unit: int) -> int:
    """Bytes of the widest element of which all offsets and the unit are multiples: the unit, or a power of two."""
    if not (src % unit).any() and not (dst % unit).any():
        return unit
    bits = int(np.bitwise_or.reduce(src)) | int(np.bitwise_or.reduce(dst)) | unit
    return bits & -bits


def _spread(addresses: NDArray[np.int64], count: int, step: int) -> NDArray[np.int64]:
    return addresses if count == 1 else np.add.outer(addresses, np.arange(count) * step).reshape(-1)


def _copy_elements(
    src: NDArray[np.int64], dst: NDArray[np.int64], low_src: int, low_dst: int, width: int, per: int
) -> None:
    a, b = (src - low_src) // width, (dst - low_dst) // width
    if per > 1:
        inner = np.arange(per)
        a, b = np.add.outer(a, inner).reshape(-1), np.add.outer(b, inner).reshape(-1)
    source = _elements(low_src, int(a.max()) + 1, width)
    target = _elements(low_dst, int(b.max()) + 1, width)
    if _dense(b):
        first = int(b[0])
        np.take(source, a, out=target[first : first + len(a)], mode="clip")
    elif _dense(a):
        first = int(a[0])
        target[b] = source[first : first + len(a)]
    else:
        target[b] = source[a]


def _dense(index: NDArray[np.int64]) -> bool:
    return bool(index[-1] - index[0] == len(index) - 1 and (index[1:] > index[:-1]).all())


def _elements(address: int, count: int, width: int) -> NDArray[np.void]:
    memory = (ctypes.c_uint8 * (count * width)).from_address(address)
    return np.ctypeslib.as_array(memory).view(np.dtype((np.void, width)))
