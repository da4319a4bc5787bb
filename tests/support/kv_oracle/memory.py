"""Memory of one rank as one 64-bit code per byte, and an executor of runs that refuses what a real agent would refuse.

NOTHING   never written                         TAIL   source: room of a held block behind its last token
JUNK      source: bytes of nobody's tokens      >= 0   the coordinate that the byte belongs to
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTHING, JUNK, TAIL = -1, -2, -3


class RunRefused(AssertionError):
    """A run leaves its registered region, or writes a byte that has been written before."""


class Memory:
    """Registered regions [(base, size)] of one rank; bytes outside them do not exist."""

    def __init__(self, regions: list[tuple[int, int]], value: int) -> None:
        spans = sorted(regions)
        self._starts = np.array([base for base, _ in spans], np.int64)
        self._ends = np.array([base + size for base, size in spans], np.int64)
        self._origin = np.cumsum([0, *(size for _, size in spans)])[:-1].astype(np.int64)
        total = sum(size for _, size in spans)
        self.codes = np.full(total, value, np.int64)
        self.writes = np.zeros(total, np.int64)

    def index(self, begin: NDArray[np.int64], length: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """Positions of addresses in `codes`. Raises RunRefused unless every run lies inside one region."""
        region = np.searchsorted(self._starts, begin, side="right") - 1
        inside = (region >= 0) & (begin + length <= self._ends[region])
        if not inside.all():
            worst = int(np.flatnonzero(~inside)[0])
            size = int(np.broadcast_to(length, begin.shape)[worst])
            raise RunRefused(f"run {worst} of {size} bytes at {int(begin[worst]):#x} is not inside one registration")
        return self._origin[region] + begin - self._starts[region]

    def put(self, addresses: list[int], codes: list[int], unit: int) -> None:
        """Writes codes[i], codes[i] + 1, ... to the `unit` bytes at addresses[i]; negative codes are repeated."""
        if not addresses:
            return
        at = self.index(np.array(addresses, np.int64), unit)[:, None] + np.arange(unit)
        base = np.array(codes, np.int64)[:, None]
        self.codes[at] = np.where(base >= 0, base + np.arange(unit), base)

    def at(self, addresses: list[int], unit: int) -> NDArray[np.int64]:
        """Positions in `codes` of `unit` bytes at each address, int64[len, unit]."""
        begin = np.array(addresses, np.int64)
        return self.index(begin, unit)[:, None] + np.arange(unit)


def execute(
    source: Memory, target: Memory, src: NDArray[np.int64], dst: NDArray[np.int64], length: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """memcpy of all runs. Returns (positions in the target, codes that were written), one per byte.

    Raises RunRefused when a run crosses a registration on either side, is empty, or writes a byte twice.
    """
    if len(length) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    if int(length.min()) <= 0:
        raise RunRefused("an empty run")
    step = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    read = np.repeat(source.index(src, length), length) + step
    written = np.repeat(target.index(dst, length), length) + step
    np.add.at(target.writes, written, 1)
    if int(target.writes[written].max()) > 1:
        raise RunRefused("a destination byte is written twice")
    moved = source.codes[read]
    target.codes[written] = moved
    return written, moved
