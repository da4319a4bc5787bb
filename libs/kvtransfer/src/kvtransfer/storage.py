"""Page tables of common storages, so that engines describe theirs in one call."""

from __future__ import annotations

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


def describe_attention_pool(
    *,
    base_address: int,
    num_blocks: int,
    block_bytes: int,
    layers: Sequence[int],
    kv_heads: HeadInterval,
    tokens_per_block: int,
    kind: MapperKind = MapperKind.HND,
    windows: Sequence[int | None] | None = None,
    memory_kind: MemoryKind = MemoryKind.DRAM,
    device_id: int = 0,
) -> PageTable:
    """One slot-major pool in one registration: a slot holds K and V of every layer of a block. Checked.

        slot | K of layers[0] | V of layers[0] | K of layers[1] | …            equal parts of `block_bytes`

    `layers`: global ids; `kv_heads`: the global heads in every K and V. `windows`: the sliding window of each layer,
    None = full attention (all of them when absent); layers of equal window form one layer group. Raises GeometryError.
    """
    region = RegisteredRegion(base_address, num_blocks * block_bytes, memory_kind, device_id)
    pool = PhysicalPool(base_address, slot_bytes=block_bytes, num_slots=num_blocks, layer_stride_bytes=0)
    places: dict[int | None, list[int]] = {}
    for place, window in enumerate(windows or [None] * len(layers)):
        places.setdefault(window, []).append(place)
    half = block_bytes // (2 * max(1, len(layers)))
    groups = tuple(
        AttentionGroup(
            tuple(layers[place] for place in chosen),
            tokens_per_block,
            tuple(
                PoolView(frozenset({role}), kind, 0, _buffers(chosen, half, first), kv_heads)
                for first, role in enumerate(("key", "value"))
            ),
            window,
        )
        for window, chosen in places.items()
    )
    table = PageTable((region,), (pool,), groups)
    table.validate()
    return table


def _buffers(places: Sequence[int], size: int, first: int) -> BufferEntries:
    """K (`first` 0) or V (1) of the layers at these places of a slot."""
    offset = (np.array(places, np.uint64) * np.uint64(2) + np.uint64(first)) * np.uint64(size)
    return BufferEntries(np.arange(len(places), dtype=np.uint32), offset, np.full(len(places), size, np.uint32))
