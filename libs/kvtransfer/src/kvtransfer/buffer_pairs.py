"""The buffers of one source rank matched with those of one destination rank: the input of the mappers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.arrays import expand
from kvtransfer.lanes import join_lanes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.holdings import Holdings
    from kvtransfer.overlap import Atoms
    from kvtransfer.page_table import PageTable


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of every pair, int64[N] each. `address`: of the buffer in slot 0; `size` bytes of it; units [lo, hi) are
    in it; `tokens` of a block (rows of a state); `offset` and `row`: bytes before a section, and of a whole row;
    `pitch`: bytes from one unit to the next, 0 where they follow each other."""

    address: NDArray[np.int64]
    size: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    stride: NDArray[np.int64]
    tokens: NDArray[np.int64]
    offset: NDArray[np.int64]
    row: NDArray[np.int64]
    kind: NDArray[np.int64]
    group: NDArray[np.int64]
    region: NDArray[np.int64]
    pitch: NDArray[np.int64]

    def take(self, index: NDArray[np.int64]) -> Side:
        """The pairs of these numbers."""
        return Side(*(getattr(self, field.name)[index] for field in fields(self)))

    @property
    def unit_bits(self) -> NDArray[np.int64]:
        """Bits of one token of one head. Exact: a page table whose sizes do not divide has been refused."""
        return self.size * 8 // (self.tokens * (self.hi - self.lo))

    @property
    def step_bits(self) -> NDArray[np.int64]:
        """Bits from one token of one head to the next one in memory."""
        return np.where(self.pitch > 0, self.pitch * 8, self.unit_bits)


@dataclass(frozen=True, slots=True, eq=False)
class BufferPairs:
    """Pair i moves units [lo[i], hi[i]), `unit_bytes[i]` each in sections. `buffer`: number of the destination buffer
    in packing order (layer group, pool, layer, view, n-th buffer of the layer); `layer`: global; of joined lanes the
    last."""

    src: Side
    dst: Side
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    unit_bytes: NDArray[np.int64]
    buffer: NDArray[np.int64]
    layer: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lo)

    def take(self, index: NDArray[np.int64]) -> BufferPairs:
        """The pairs of these numbers."""
        return BufferPairs(
            self.src.take(index),
            self.dst.take(index),
            self.lo[index],
            self.hi[index],
            self.unit_bytes[index],
            self.buffer[index],
            self.layer[index],
        )


def buffer_pairs(src: Holdings, dst: Holdings, atoms: Atoms, tables: tuple[PageTable, PageTable]) -> BufferPairs:
    """All buffers of the atoms of one (source rank, destination rank). `tables`: theirs."""
    a, b = src.first[atoms.src_row], dst.first[atoms.dst_row]
    which, nth = expand(np.zeros_like(a), src.count[atoms.src_row])
    left = _side(src, atoms.src_row[which], a[which] + nth, tables[0])
    right = _side(dst, atoms.dst_row[which], b[which] + nth, tables[1])
    part = dst.part[atoms.dst_row[which]]
    layer = dst.layer[atoms.dst_row[which]]
    order = (nth, dst.column("view")[part], layer, dst.column("pool")[part], right.group)
    unit = dst.column("unit_bytes")[part]
    return join_lanes(BufferPairs(left, right, atoms.lo[which], atoms.hi[which], unit, _numbers(order), layer))


def _side(holdings: Holdings, row: NDArray[np.int64], entry: NDArray[np.int64], table: PageTable) -> Side:
    part = holdings.part[row]
    address, size = holdings.address[entry], holdings.size[entry]
    slots = np.array([pool.num_slots for pool in table.pools], np.int64)[holdings.column("pool")[part]]
    stride, pitch, tokens = (holdings.column(name)[part] for name in ("stride", "pitch", "tokens"))
    units = tokens * (holdings.column("hi") - holdings.column("lo"))[part]
    span = np.where(pitch > 0, (units - 1) * pitch + size // np.maximum(units, 1), size)
    return Side(
        address=address,
        size=size,
        lo=holdings.column("lo")[part],
        hi=holdings.column("hi")[part],
        stride=stride,
        tokens=tokens,
        offset=holdings.column("offset")[part],
        row=holdings.column("row_bytes")[part],
        kind=holdings.column("kind")[part],
        group=holdings.column("group")[part],
        region=_regions(table, address, address + (slots - 1) * stride + span),
        pitch=pitch,
    )


def _regions(table: PageTable, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The region that holds [begin, end), -1 when there is none."""
    regions = sorted(table.regions, key=lambda region: region.base_address)
    starts = np.array([region.base_address for region in regions], np.int64)
    ends = np.array([region.end for region in regions], np.int64)
    found = np.searchsorted(starts, begin, side="right") - 1
    return np.where(end <= ends[found], found, -1)


def _numbers(columns: tuple[NDArray[np.int64], ...]) -> NDArray[np.int64]:
    """Equal rows get equal numbers, ascending in lexicographic order (last column first)."""
    order = np.lexsort(columns)
    new = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(new)
    return numbers
