"""Where the KV cache of one rank lies in its memory: the pools, their strides, and the page table over them. Pure.

A *row* is the K or the V of one head and one token, `row_bytes` long. Of a layer in a block:

    hnd   | K: head 0 [token] | head 1 [token] ... | V: head 0 [token] ...      a head is one run
    nhd   | K: token 0 [head] | token 1 [head] ... | V: token 0 [head] ...      a token is one run

    slot_major    | block 0: layer 0 | layer 1 ... | block 1: layer 0 ...       one pool for all its layers
    layer_major   | layer 0: block 0 | block 1 ... | layer 1: block 0 ...

Layers that see the same positions are a *group*, numbered over the whole model. Groups share one list of blocks, or
(`separate`) each has a list of its own, and a pool with as many blocks as suit it. Layer-major groups never share a
pool, since the layers of a pool must be equally far from each other.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """As the section `cache` of the configuration. `nhd`: token-major blocks. `layer_major`: see the module.
    `separate`: each layer group has a block list and a pool of its own."""

    nhd: bool = False
    layer_major: bool = False
    separate: bool = False


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Which layers of a model see the same positions. `windows`: what each group sees, in the order in which they
    appear over all layers; None: everything. `of_layer`: the group of each layer of the model."""

    windows: tuple[int | None, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> LayerGroups:
        """From the window of each layer."""
        distinct = tuple(dict.fromkeys(windows))
        return cls(distinct, tuple(distinct.index(one) for one in windows))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one rank keeps. `layers`: global ids; `kv_heads`: the global heads in every K and V; `row_bytes`: one head
    of one token."""

    layers: tuple[int, ...]
    groups: LayerGroups
    kv_heads: HeadInterval
    tokens_per_block: int
    row_bytes: int
    options: CacheOptions = CacheOptions()

    @property
    def lists(self) -> int:
        """Block lists of a sequence: those of the whole model, also where this rank has no layer of a group."""
        return len(self.groups.windows) if self.options.separate else 1

    def list_of(self, layer: int) -> int:
        """The block list of a global layer."""
        return self.groups.of_layer[layer] if self.options.separate else 0

    @property
    def group_lists(self) -> tuple[int, ...]:
        """The block list of each layer group of this rank's page table."""
        of_group = {self.groups.of_layer[layer]: self.list_of(layer) for layer in self.layers}
        return tuple(of_group[group] for group in self.held_groups)

    @property
    def half_bytes(self) -> int:
        """K, or V, of one layer in one block."""
        return len(self.kv_heads) * self.tokens_per_block * self.row_bytes

    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block of each list."""
        counts = np.bincount([self.list_of(layer) for layer in self.layers], minlength=self.lists)
        return tuple(int(count) * 2 * self.half_bytes for count in counts)

    @property
    def held_groups(self) -> tuple[int, ...]:
        """Groups of the model of which this rank has a layer, ascending: the order of its page table."""
        return tuple(sorted({self.groups.of_layer[layer] for layer in self.layers}))


@dataclass(frozen=True, slots=True)
class Pool:
    """Part of the memory. `layers`: places in CacheShape.layers; `number`: of its block list. Bytes.

    address(layer i of the pool, block b) = offset + i * layer_stride + b * block_stride
    """

    layers: tuple[int, ...]
    number: int
    num_blocks: int
    offset: int
    layer_stride: int
    block_stride: int

    @property
    def size(self) -> int:
        """Bytes of the pool."""
        return self.num_blocks * len(self.layers) * min(self.layer_stride, self.block_stride)


def plan_pools(shape: CacheShape, num_blocks: Sequence[int]) -> tuple[Pool, ...]:
    """`num_blocks`: of each list. Every pool begins on a page of the memory, which ends with the last pool."""
    options = shape.options
    places: dict[int, list[int]] = {}
    for place, layer in enumerate(shape.layers):
        apart = options.separate or options.layer_major
        places.setdefault(shape.groups.of_layer[layer] if apart else 0, []).append(place)
    pools: list[Pool] = []
    offset = 0
    for _, layers in sorted(places.items()):
        number = shape.list_of(shape.layers[layers[0]])
        count, slot = num_blocks[number], 2 * shape.half_bytes
        strides = (count * slot, slot) if options.layer_major else (slot, slot * len(layers))
        pools.append(Pool(tuple(layers), number, count, offset, *strides))
        offset += -(-pools[-1].size // mmap.PAGESIZE) * mmap.PAGESIZE
    return tuple(pools)


def memory_bytes(pools: Sequence[Pool]) -> int:
    """What all pools need."""
    return pools[-1].offset + pools[-1].size


def describe_cache(
    shape: CacheShape,
    pools: Sequence[Pool],
    base_address: int,
    memory_kind: MemoryKind = MemoryKind.DRAM,
    device_id: int = 0,
) -> PageTable:
    """The page table of memory at `base_address`, one registration. Its layer groups are `shape.held_groups`. Checked:
    raises GeometryError."""
    region = RegisteredRegion(base_address, memory_bytes(pools), memory_kind, device_id)
    physical = tuple(_physical(shape, pool, base_address) for pool in pools)
    groups: list[AttentionGroup] = []
    for group in shape.held_groups:
        places = [at for at, layer in enumerate(shape.layers) if shape.groups.of_layer[layer] == group]
        number, pool = next((n, one) for n, one in enumerate(pools) if places[0] in one.layers)
        views = tuple(_view(shape, pool, number, places, half) for half in (0, 1))
        ids = tuple(shape.layers[at] for at in places)
        groups.append(AttentionGroup(ids, shape.tokens_per_block, views, shape.groups.windows[group]))
    table = PageTable((region,), physical, tuple(groups))
    table.validate()
    return table


def _physical(shape: CacheShape, pool: Pool, base_address: int) -> PhysicalPool:
    base = base_address + pool.offset
    if shape.options.layer_major:
        return PhysicalPool(base, pool.block_stride, pool.num_blocks)
    return PhysicalPool(base, pool.block_stride, pool.num_blocks, layer_stride_bytes=0)


def _view(shape: CacheShape, pool: Pool, number: int, places: Sequence[int], half: int) -> PoolView:
    """K (`half` 0) or V (1) of the layers at `places`."""
    size = shape.half_bytes
    if shape.options.layer_major:
        offset = np.full(len(places), half * size, np.uint64)
    else:
        within = np.array([pool.layers.index(place) for place in places], np.uint64)
        offset = within * np.uint64(pool.layer_stride) + np.uint64(half * size)
    entries = BufferEntries(np.arange(len(places), dtype=np.uint32), offset, np.full(len(places), size, np.uint32))
    kind = MapperKind.NHD if shape.options.nhd else MapperKind.HND
    return PoolView(frozenset({"value" if half else "key"}), kind, number, entries, shape.kv_heads)
