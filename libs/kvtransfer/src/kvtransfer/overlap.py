"""Where two instances hold the same thing: rows joined on (what, layer), then cut into atoms at every border of either.

    source rank 0   |— heads 0 1 —|                     TP2 of 3 heads, the ranks share head 1
    source rank 1         |— heads 1 2 —|
    destination     |—————— heads 0 1 2 ——————|
    atoms           |  0   |  1   |  2        |         head 1 comes twice: rank 0 and rank 1 are replicas of it

No arithmetic on topology sizes: uneven pipeline splits, head counts that do not divide and duplicated heads are all
intervals, and intervals are intersected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.arrays import expand

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.holdings import Holdings, What

_SHIFT = 32
_LOW = (1 << _SHIFT) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Atoms:
    """Units [lo, hi) of one layer that row src_row of the source and row dst_row of the destination both hold."""

    src_row: NDArray[np.int64]
    dst_row: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lo)

    def take(self, index: NDArray[np.int64]) -> Atoms:
        """The atoms of these numbers."""
        return Atoms(self.src_row[index], self.dst_row[index], self.lo[index], self.hi[index])


def overlap(src: Holdings, dst: Holdings) -> Atoms:
    """Every atom of every pair of ranks; one that several source ranks hold comes once for each of them."""
    numbers: dict[What, int] = {}
    keys_src, keys_dst = _keys(src, numbers), _keys(dst, numbers)
    code_src = keys_src[src.part] << _SHIFT | src.layer
    code_dst = keys_dst[dst.part] << _SHIFT | dst.layer
    order = np.argsort(code_src, kind="stable")
    left = np.searchsorted(code_src, code_dst, "left", sorter=order)
    right = np.searchsorted(code_src, code_dst, "right", sorter=order)
    dst_row, position = expand(left, right)
    src_row = order[position]
    lo = np.maximum(src.column("lo")[src.part[src_row]], dst.column("lo")[dst.part[dst_row]])
    hi = np.minimum(src.column("hi")[src.part[src_row]], dst.column("hi")[dst.part[dst_row]])
    meet = lo < hi
    pairs = Atoms(src_row[meet], dst_row[meet], lo[meet], hi[meet])
    return _cut(pairs, keys_dst[dst.part[pairs.dst_row]] << _SHIFT, _borders((src, keys_src), (dst, keys_dst)))


def same_units(src: Holdings, dst: Holdings) -> bool:
    """True when the ranks of either side hold the same units of the same layers between them."""
    numbers: dict[What, int] = {}
    sides = [(one, _keys(one, numbers)) for one in (src, dst)]
    borders = _borders(*sides)
    held: list[NDArray[np.int64]] = []
    for one, keys in sides:
        high = keys << _SHIFT
        ends = (np.searchsorted(borders, high | one.column(name)) for name in ("lo", "hi"))
        which, border = expand(*(end[one.part] for end in ends))
        # A border belongs to one `what` only.
        held.append(np.unique(one.layer[which] << _SHIFT | border))
    return np.array_equal(held[0], held[1])


def _keys(holdings: Holdings, numbers: dict[What, int]) -> NDArray[np.int64]:
    return np.array([numbers.setdefault(part.what, len(numbers)) for part in holdings.parts], np.int64)


def _borders(*sides: tuple[Holdings, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Every begin and end of anybody's interval, `what` in the high bits."""
    return np.unique(
        np.concatenate([keys << _SHIFT | holdings.column(n) for holdings, keys in sides for n in ("lo", "hi")])
    )


def _cut(pairs: Atoms, high: NDArray[np.int64], borders: NDArray[np.int64]) -> Atoms:
    begin = np.searchsorted(borders, high | pairs.lo)
    end = np.searchsorted(borders, high | pairs.hi)
    which, border = expand(begin, end)
    return Atoms(pairs.src_row[which], pairs.dst_row[which], borders[border] & _LOW, borders[border + 1] & _LOW)
