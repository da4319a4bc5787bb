"""Deep checks of a page table: what the constructors of its parts can not see."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import GeometryError
from kvtransfer.page_table import MAX_ADDRESS, MapperKind, entry_addresses

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.page_table import AttentionGroup, PageTable, PhysicalPool, PoolView

# Bounds the work of one check: pairs of buffers compared, and buffer-slot pairs looked up one by one.
MAX_GROUP_ENTRIES = 1 << 14
MAX_LOOKUPS = 1 << 26


def check_page_table(table: PageTable) -> None:
    """Raises GeometryError naming field and value; see PageTable.validate."""
    if not table.groups:
        raise GeometryError("groups", "()", "a page table needs at least one layer group")
    starts, ends = _sorted_regions(table)
    _layers_once(table)
    for g, group in enumerate(table.groups):
        for v, view in enumerate(group.views):
            field = f"groups[{g}].views[{v}]"
            if view.pool >= len(table.pools):
                raise GeometryError(f"{field}.pool", view.pool, f"there are {len(table.pools)} pools")
            pool = table.pools[view.pool]
            _check_view(group, view, pool, field)
            _check_inside_regions(pool, view, starts, ends, field)
        _check_disjoint(table, group, f"groups[{g}]")


def _layers_once(table: PageTable) -> None:
    seen: set[int] = set()
    for g, group in enumerate(table.groups):
        twice = seen.intersection(group.global_layer_ids)
        if twice:
            raise GeometryError(f"groups[{g}].global_layer_ids", sorted(twice), "are in an earlier group too")
        seen.update(group.global_layer_ids)


def _sorted_regions(table: PageTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not table.regions:
        raise GeometryError("regions", "()", "nothing is registered")
    regions = sorted(table.regions, key=lambda region: region.base_address)
    for before, after in pairwise(regions):
        if before.end > after.base_address:
            value = f"{after.base_address:#x}"
            raise GeometryError("regions.base_address", value, f"overlaps the region at {before.base_address:#x}")
    starts = np.array([region.base_address for region in regions], np.int64)
    ends = np.array([region.end for region in regions], np.int64)
    return starts, ends


def _check_view(group: AttentionGroup, view: PoolView, pool: PhysicalPool, field: str) -> None:
    entries = view.entries
    layers = len(group.global_layer_ids)
    if int(entries.layer.max()) >= layers:
        raise GeometryError(f"{field}.entries.layer", int(entries.layer.max()), f"the group has {layers} layers")
    # Python integers: nothing here can overflow before it has been compared.
    for offset, size in zip(entries.offset.tolist(), entries.size.tolist(), strict=True):
        if offset + size > pool.slot_bytes:
            raise GeometryError(f"{field}.entries", f"{offset} + {size}", f"leaves the slot of {pool.slot_bytes} bytes")
    last_layer = int(entries.layer.max()) * pool.layer_stride
    last = pool.base_address + last_layer + (pool.num_slots - 1) * pool.slot_stride + pool.slot_bytes
    if last > MAX_ADDRESS:
        raise GeometryError(f"{field}.pool", view.pool, "its last slot ends above 2^63 - 1")
    parts = group.tokens_per_block
    if view.mapper_kind is not MapperKind.REPLICATED:
        parts *= len(view.kv_heads)
    uneven = entries.size[entries.size % np.uint64(parts) != 0]
    if len(uneven):
        raise GeometryError(f"{field}.entries.size", int(uneven[0]), f"is not a multiple of {parts} tokens x heads")


def _check_inside_regions(
    pool: PhysicalPool, view: PoolView, starts: NDArray[np.int64], ends: NDArray[np.int64], field: str
) -> None:
    first = entry_addresses(pool, view.entries)
    sizes = view.entries.size.astype(np.int64)
    span = np.int64((pool.num_slots - 1) * pool.slot_stride)
    # Most pools lie in one registration: then the first and the last slot decide for all slots between them.
    whole = _inside_one(first, sizes + span, starts, ends)
    rest = np.flatnonzero(~whole)
    if len(rest) * pool.num_slots > MAX_LOOKUPS:
        raise GeometryError(f"{field}.pool", view.pool, "spreads too many buffers over several regions")
    slots = np.arange(pool.num_slots, dtype=np.int64) * np.int64(pool.slot_stride)
    for index in rest:
        inside = _inside_one(first[index] + slots, np.full(len(slots), sizes[index]), starts, ends)
        if not inside.all():
            slot = int(np.flatnonzero(~inside)[0])
            value = f"{int(first[index] + slots[slot]):#x} + {int(sizes[index])}"
            problem = f"buffer {index} of slot {slot} is not inside one registered region"
            raise GeometryError(f"{field}.entries", value, problem)


def _inside_one(
    begin: NDArray[np.int64], size: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    region = np.searchsorted(starts, begin, side="right") - 1
    return (region >= 0) & (begin + size <= ends[region])


def _check_disjoint(table: PageTable, group: AttentionGroup, field: str) -> None:
    """No byte of the group belongs to two (buffer, slot) pairs, or it would have two writers."""
    count = sum(len(view.entries) for view in group.views)
    if count > MAX_GROUP_ENTRIES:
        raise GeometryError(f"{field}.views", count, f"buffers; at most {MAX_GROUP_ENTRIES} are accepted")
    pools = [table.pools[view.pool] for view in group.views]
    base = np.concatenate([entry_addresses(p, v.entries) for p, v in zip(pools, group.views, strict=True)])
    size = np.concatenate([v.entries.size.astype(np.int64) for v in group.views])
    lengths = [len(view.entries) for view in group.views]
    stride = np.repeat(np.array([pool.slot_stride for pool in pools], np.int64), lengths)
    slots = np.repeat(np.array([pool.num_slots for pool in pools], np.int64), lengths)
    order = np.argsort(base, kind="stable")
    base, size, stride, slots = base[order], size[order], stride[order], slots[order]
    end = base + (slots - 1) * stride + size
    begins: list[int] = base.tolist()
    for i in range(count - 1):
        # Only later buffers that begin before this one's last slot ends can meet it.
        stop = bisect_left(begins, int(end[i]))
        later = slice(i + 1, stop)
        if stop <= i + 1:
            continue
        if (stride[later] != stride[i]).any():
            raise GeometryError(f"{field}.views", f"{int(base[i]):#x}", "pools of different slot strides interleave")
        gap = base[later] - base[i]
        k = gap // stride[i]
        rest = gap - k * stride[i]
        # Slot s of the later buffer meets slot s + k (from below) or slot s + k + 1 (from above) of this one.
        below = (k < slots[i]) & (rest < size[i])
        above = (k + 1 < slots[i]) & (stride[i] - rest < size[later])
        if (below | above).any():
            raise GeometryError(f"{field}.views", f"{int(base[i]):#x}", "two buffers share bytes")
