"""What copies cost on this rank: a few megabytes gathered and scattered inside an arena before anybody uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.cost.book import Copying
from kvtransfer.packed import Packed, PackedGrid, PiecePlaces, RunPlaces

if TYPE_CHECKING:
    from kvtransfer.bounce.copying import Copier, Copy

# The smaller fragments show what a fragment costs, the larger ones what a byte does.
_SMALL, _LARGE = 512, 16 << 10
_LEAST = 1 << 20
_TURNS = 3
# On a device a launch takes as long as the copy of some megabytes.
HOST_MOST, DEVICE_MOST = 8 << 20, 64 << 20


def measure_copies(
    copier: Copier, arena: int, nbytes: int, most: int = HOST_MOST, clock: Callable[[], float] = time.perf_counter
) -> Copying:
    """`arena`: address of `nbytes` that hold nothing, of which at most three times `most` are touched. A device
    compiles its kernels here, not at the first request."""
    half = min(nbytes // 4, most) // _LARGE * _LARGE
    gathers = [_best(copier, arena, half, unit, clock, reads=True) for unit in (_SMALL, _LARGE)]
    scatters = [_best(copier, arena, half, unit, clock, reads=False) for unit in (_SMALL, _LARGE)]
    more = half // _SMALL - half // _LARGE
    fragment = max(0.0, (gathers[0] - gathers[1] + scatters[0] - scatters[1]) / 2 / more)
    return Copying(half / gathers[1], half / scatters[1], fragment)


def can_measure(nbytes: int) -> bool:
    """True when an arena is large enough to say anything."""
    return nbytes >= 4 * _LEAST


def _best(copier: Copier, arena: int, half: int, unit: int, clock: Callable[[], float], *, reads: bool) -> float:
    packed = _scattered(arena, half, unit, reads=reads)
    copy = copier.gather if reads else copier.scatter
    best = float("inf")
    for _ in range(_TURNS):
        began = clock()
        _wait(copy(packed, 0, half, arena + 2 * half))
        best = min(best, clock() - began)
    return max(best, 1e-7)


def _wait(copy: Copy) -> None:
    while not copy.done():
        pass


def _scattered(arena: int, nbytes: int, unit: int, *, reads: bool) -> Packed:
    """`nbytes` in runs of `unit` bytes with gaps as large, in no order."""
    count = nbytes // unit
    one, none = np.ones(count, np.int64), np.zeros(count, np.int64)
    order = np.random.default_rng(0).permutation(count)
    pieces = PiecePlaces(order, none, np.arange(count), one, none, one)
    bits = np.array([8 * unit])
    zero = bits * 0
    runs = RunPlaces(np.array([arena]), np.array([2 * unit]), bits, bits, zero, bits, zero, bits < 0, zero, 1)
    return Packed((PackedGrid(runs, pieces, count, 0, reads=reads),), nbytes)
