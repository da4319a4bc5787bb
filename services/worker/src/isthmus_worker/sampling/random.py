"""Random numbers without a generator: the number of a token depends on who asks for it and on nothing else.

Batches, instances, retries and preemption can not change it, so a run can be repeated and a hand-off moves no state.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_PACK = struct.Struct("<QQQ").pack


def uniforms(keys: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """One number in (0, 1) for each (seed, sample index, absolute position), all unsigned 64-bit. float64[N].

    It is the middle of the cell, of 2^52 equal ones, that the upper bits of xxh3_64(three little-endian u64) name.
    """
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(_PACK(*key)) for key in keys), np.uint64)
    return ((hashes >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
