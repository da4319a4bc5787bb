"""Geometry of one rank's KV storage: registered memory, pools in it, layer groups over the pools. Frozen values.

    region   |=================== one registration ===================|
    pool       |slot 0 |slot 1 |slot 2 | ...                               slot = where a block lives
    entry        |K L0|V L0|K L1|V L1|                                     one buffer of one layer in a slot

    address(entry, slot) = base + entry.layer * layer_stride + slot * slot_stride + entry.offset

A block id is the slot number in every pool of its group. All addresses and sizes are bytes.
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


class MemoryKind(Enum):
    """Where registered memory lives. Values are those of `isthmus.v1.MemoryKind`."""

    DRAM = 1
    VRAM = 2


class MapperKind(Enum):
    """How the bytes of a buffer are cut when two sides hold different heads. Values of `isthmus.v1.MapperKind`."""

    HND = 1
    NHD = 2
    REPLICATED = 3


def _require(ok: bool, field: str, value: object, problem: str) -> None:
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
        _require(self.base_address > 0, "region.base_address", self.base_address, "must be above 0")
        _require(self.size_bytes > 0, "region.size_bytes", self.size_bytes, "must be above 0")
        _require(self.end <= MAX_ADDRESS, "region.size_bytes", self.size_bytes, "region ends above 2^63 - 1")
        _require(0 <= self.device_id < 1 << 16, "region.device_id", self.device_id, "must lie in [0, 65536)")

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.base_address + self.size_bytes


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
        _require(self.base_address > 0, "pool.base_address", self.base_address, "must be above 0")
        _require(self.slot_bytes > 0, "pool.slot_bytes", self.slot_bytes, "must be above 0")
        _require(0 < self.num_slots <= 1 << 31, "pool.num_slots", self.num_slots, "must lie in [1, 2^31]")
        _require(
            self.slot_stride >= self.slot_bytes,
            "pool.slot_stride_bytes",
            self.slot_stride,
            f"slots of {self.slot_bytes} bytes would overlap",
        )
        _require(self.layer_stride >= 0, "pool.layer_stride_bytes", self.layer_stride, "must not be negative")

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
            _require(array.dtype == dtype, f"entries.{name}", array.dtype, f"must be {np.dtype(dtype)}")
            _require(array.ndim == 1, f"entries.{name}", array.shape, "must have one dimension")
            _require(len(array) == len(self.layer), f"entries.{name}", len(array), f"layer has {len(self.layer)}")
            if array.flags.writeable:
                array = array.copy()
                array.setflags(write=False)
                object.__setattr__(self, name, array)
        _require(len(self.layer) > 0, "entries.layer", "[]", "a view needs at least one buffer")
        _require(bool(self.size.all()), "entries.size", 0, "a buffer needs at least one byte")

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
        _require(0 <= self.begin < self.end, "kv_heads", f"[{self.begin}, {self.end})", "must not be empty")

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PoolView:
    """What one layer group keeps in one pool. `roles` are opaque labels: views match only if their sets are equal."""

    roles: frozenset[str]
    mapper_kind: MapperKind
    pool: int
    entries: BufferEntries
    kv_heads: HeadInterval

    def __post_init__(self) -> None:
        _require(bool(self.roles), "view.roles", "{}", "must name at least one role")


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers that share a block table. `sliding_window` in tokens, None = full attention."""

    global_layer_ids: tuple[int, ...]
    tokens_per_block: int
    views: tuple[PoolView, ...]
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        ids = self.global_layer_ids
        _require(bool(ids), "group.global_layer_ids", "()", "a group needs at least one layer")
        _require(min(ids) >= 0 and max(ids) < 1 << 32, "group.global_layer_ids", ids, "must lie in [0, 2^32)")
        _require(len(set(ids)) == len(ids), "group.global_layer_ids", ids, "names a layer twice")
        _require(self.tokens_per_block > 0, "group.tokens_per_block", self.tokens_per_block, "must be above 0")
        _require(bool(self.views), "group.views", "()", "a group needs at least one view")
        window = self.sliding_window
        _require(window is None or window > 0, "group.sliding_window", window, "must be above 0 or absent")


@dataclass(frozen=True, slots=True)
class PageTable:
    """All KV storage of one rank, whichever cache manager made it. `validate` before use."""

    regions: tuple[RegisteredRegion, ...]
    pools: tuple[PhysicalPool, ...]
    groups: tuple[AttentionGroup, ...]

    def validate(self) -> None:
        """Raises GeometryError unless every buffer of every slot lies inside exactly one registered region, no two
        buffers of a group share a byte, all sizes divide exactly and all addresses stay below 2^63."""
        from kvtransfer.page_table_check import check_page_table

        check_page_table(self)

    def num_blocks(self, group: int) -> int:
        """Block ids of the group lie in [0, num_blocks): the smallest slot count among its pools."""
        return min(self.pools[view.pool].num_slots for view in self.groups[group].views)


def entry_addresses(pool: PhysicalPool, entries: BufferEntries) -> NDArray[np.int64]:
    """Address of every buffer in slot 0, int64[E]."""
    return (
        np.int64(pool.base_address)
        + entries.layer.astype(np.int64) * np.int64(pool.layer_stride)
        + entries.offset.astype(np.int64)
    )
