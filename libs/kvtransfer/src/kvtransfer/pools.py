"""Registered memory, the pools in it and what a layer group keeps in a pool. Frozen values.

    region   |=================== one registration ===================|
    pool       |slot 0 |slot 1 |slot 2 | ...                               slot = where a block (or a sequence) lives
    entry        |K L0|V L0|K L1|V L1|                                     one buffer of one layer in a slot

    address(entry, slot) = base + entry.layer * layer_stride + slot * slot_stride + entry.offset

All addresses and sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import GeometryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Addresses are computed in int64.
MAX_ADDRESS = (1 << 63) - 1
# Bounds of what a plan enumerates.
MAX_HEADS = 1 << 16
MAX_ROWS = 1 << 12


class MemoryKind(Enum):
    """Where registered memory lives. Values are those of `isthmus.v1.MemoryKind`.

    Of BLOCK, OBJECT and FILE the addresses are byte offsets and the device id names the device, object or open file.
    """

    DRAM = 1
    VRAM = 2
    BLOCK = 3
    OBJECT = 4
    FILE = 5

    def meets(self, peer: MemoryKind) -> bool:
        """True when a transfer with a peer whose cache lies in that kind goes through memory of this kind. Otherwise it
        goes through host memory beside it: different kinds meet in DRAM, on both sides."""
        return self is peer or self is MemoryKind.DRAM


class MapperKind(Enum):
    """How the bytes of a buffer are cut when two sides hold different heads. Values of `isthmus.v1.MapperKind`."""

    HND = 1
    NHD = 2
    REPLICATED = 3
    SECTIONED = 4


def require(ok: bool, field: str, value: object, problem: str) -> None:
    """Raises GeometryError unless `ok`."""
    if not ok:
        raise GeometryError(field, value, problem)


@dataclass(frozen=True, slots=True)
class RegisteredRegion:
    """One memory registration of the agent: [base_address, base_address + size_bytes) on one device."""

    base_address: int
    size_bytes: int
    memory_kind: MemoryKind
    device_id: int = 0

    def __post_init__(self) -> None:
        lowest = 1 if self.memory_kind in (MemoryKind.DRAM, MemoryKind.VRAM) else 0
        problem = f"must be at least {lowest} for {self.memory_kind.name}"
        require(self.base_address >= lowest, "region.base_address", self.base_address, problem)
        require(self.size_bytes > 0, "region.size_bytes", self.size_bytes, "must be above 0")
        require(self.end <= MAX_ADDRESS, "region.size_bytes", self.size_bytes, "region ends above 2^63 - 1")
        require(0 <= self.device_id < 1 << 16, "region.device_id", self.device_id, "must lie in [0, 65536)")

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.base_address + self.size_bytes

    def overlaps(self, other: RegisteredRegion) -> bool:
        """True when the two share a byte."""
        place, its = (self.memory_kind, self.device_id), (other.memory_kind, other.device_id)
        return place == its and self.base_address < other.end and other.base_address < self.end


@dataclass(frozen=True, slots=True)
class PhysicalPool:
    """Affine view of memory. Absent strides mean dense layer-major storage: slot_stride = slot_bytes,
    layer_stride = num_slots * slot_stride. A slot-major pool says layer_stride_bytes = 0 and places its layers by
    the offsets of the entries."""

    base_address: int
    slot_bytes: int
    num_slots: int
    slot_stride_bytes: int | None = None
    layer_stride_bytes: int | None = None

    def __post_init__(self) -> None:
        require(self.base_address > 0, "pool.base_address", self.base_address, "must be above 0")
        require(self.slot_bytes > 0, "pool.slot_bytes", self.slot_bytes, "must be above 0")
        require(0 < self.num_slots <= 1 << 31, "pool.num_slots", self.num_slots, "must lie in [1, 2^31]")
        require(
            self.slot_stride >= self.slot_bytes,
            "pool.slot_stride_bytes",
            self.slot_stride,
            f"slots of {self.slot_bytes} bytes would overlap",
        )
        require(self.layer_stride >= 0, "pool.layer_stride_bytes", self.layer_stride, "must not be negative")

    @property
    def slot_stride(self) -> int:
        """Bytes between consecutive slots."""
        return self.slot_bytes if self.slot_stride_bytes is None else self.slot_stride_bytes

    @property
    def layer_stride(self) -> int:
        """Bytes between consecutive layers of the group."""
        return self.num_slots * self.slot_stride if self.layer_stride_bytes is None else self.layer_stride_bytes


@dataclass(frozen=True, slots=True, eq=False)
class BufferEntries:
    """Struct of arrays of length E: buffer i belongs to position layer[i] (u32) of the group's global_layer_ids, begins
    offset[i] (u64) bytes into its slot and is size[i] (u32) bytes long. The arrays are made read-only."""

    layer: NDArray[np.uint32]
    offset: NDArray[np.uint64]
    size: NDArray[np.uint32]

    def __post_init__(self) -> None:
        for name, dtype in (("layer", np.uint32), ("offset", np.uint64), ("size", np.uint32)):
            array: NDArray[np.generic] = getattr(self, name)
            require(array.dtype == dtype, f"entries.{name}", array.dtype, f"must be {np.dtype(dtype)}")
            require(array.ndim == 1, f"entries.{name}", array.shape, "must have one dimension")
            require(len(array) == len(self.layer), f"entries.{name}", len(array), f"layer has {len(self.layer)}")
            if array.flags.writeable:
                array = array.copy()
                array.setflags(write=False)
                object.__setattr__(self, name, array)
        require(len(self.layer) > 0, "entries.layer", "[]", "a view needs at least one buffer")
        require(bool(self.size.all()), "entries.size", 0, "a buffer needs at least one byte")

    def __len__(self) -> int:
        return len(self.layer)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BufferEntries):
            return NotImplemented
        return all(np.array_equal(getattr(self, n), getattr(other, n)) for n in ("layer", "offset", "size"))

    def __hash__(self) -> int:
        return hash((self.layer.tobytes(), self.offset.tobytes(), self.size.tobytes()))


@dataclass(frozen=True, slots=True)
class HeadInterval:
    """Global KV heads [begin, end)."""

    begin: int
    end: int

    def __post_init__(self) -> None:
        inside = 0 <= self.begin < self.end <= MAX_HEADS
        require(inside, "kv_heads", f"[{self.begin}, {self.end})", f"must be inside [0, {MAX_HEADS}) and not empty")

    def __len__(self) -> int:
        return self.end - self.begin


# What a view without heads holds.
ONE_HEAD = HeadInterval(0, 1)


@dataclass(frozen=True, slots=True)
class Section:
    """Part of every row of a SECTIONED buffer: global units [begin, end) of what `label` names, each `unit_bytes`.

    A section that every rank holds whole says the same interval everywhere. An empty interval is allowed.
    """

    label: str
    begin: int
    end: int
    unit_bytes: int

    def __post_init__(self) -> None:
        require(bool(self.label), "section.label", "''", "must not be empty")
        inside = 0 <= self.begin <= self.end < 1 << 31
        require(inside, f"section {self.label}", f"[{self.begin}, {self.end})", "must lie in [0, 2^31)")
        require(self.unit_bytes > 0, f"section {self.label}.unit_bytes", self.unit_bytes, "must be above 0")

    @property
    def nbytes(self) -> int:
        """Bytes in one row."""
        return (self.end - self.begin) * self.unit_bytes


@dataclass(frozen=True, slots=True)
class PoolView:
    """What one layer group keeps in one pool. `roles` are opaque labels: views match only if their sets are equal.

        HND         [head][token][bits]      kv_heads: the global heads this rank holds
        NHD         [token][head][bits]      likewise
        REPLICATED  [token][bits]            the same on every tensor-parallel rank
        SECTIONED   [row][section][unit]     recurrent state; `sections` in the order of the bytes, `rows` of them

    `pitch`: bytes from one unit (a token of a head) to the next where they do not follow each other; sizes still count
    the bytes of the units alone. Storage that puts K and V of a token side by side has two views of half its pitch:

        size      |K K K|     |K K K|     |K K K|            `spans` |K…K.....K…K.....K…K|
        pitch      k k k v v v k k k v v v k k k v v v

    The n-th buffer of a layer is the n-th buffer of that layer in the peer's view, wherever either of them lies.
    """

    roles: frozenset[str]
    mapper_kind: MapperKind
    pool: int
    entries: BufferEntries
    kv_heads: HeadInterval = ONE_HEAD
    sections: tuple[Section, ...] = ()
    rows: int = 1
    pitch: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.roles), "view.roles", "{}", "must name at least one role")
        require(self.pool >= 0, "view.pool", self.pool, "must not be negative")
        require(0 < self.rows <= MAX_ROWS, "view.rows", self.rows, f"must lie in [1, {MAX_ROWS}]")
        sectioned = self.mapper_kind is MapperKind.SECTIONED
        labels = [section.label for section in self.sections]
        require(sectioned == bool(labels), "view.sections", labels, "belong to SECTIONED views, and only to them")
        require(len(set(labels)) == len(labels), "view.sections", labels, "names a section twice")
        require(sectioned or self.rows == 1, "view.rows", self.rows, "only SECTIONED buffers have rows")
        pitched = self.pitch is not None
        require(not (sectioned and pitched), "view.pitch", self.pitch, "belongs to views of tokens")
        require(self.pitch is None or 0 < self.pitch < 1 << 31, "view.pitch", self.pitch, "must lie in [1, 2^31)")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a SECTIONED buffer."""
        return sum(section.nbytes for section in self.sections)

    def units(self, tokens: int) -> int:
        """Units of a buffer that holds `tokens` tokens."""
        return tokens if self.mapper_kind is MapperKind.REPLICATED else tokens * len(self.kv_heads)

    def spans(self, tokens: int) -> NDArray[np.int64]:
        """Bytes from the first to the end of the last one of every buffer, int64[E]; `tokens` of a block."""
        size = self.entries.size.astype(np.int64)
        if self.pitch is None:
            return size
        units = self.units(tokens)
        return (units - 1) * np.int64(self.pitch) + size // units


def entry_addresses(pool: PhysicalPool, entries: BufferEntries) -> NDArray[np.int64]:
    """Address of every buffer in slot 0, int64[E]."""
    return (
        np.int64(pool.base_address)
        + entries.layer.astype(np.int64) * np.int64(pool.layer_stride)
        + entries.offset.astype(np.int64)
    )
