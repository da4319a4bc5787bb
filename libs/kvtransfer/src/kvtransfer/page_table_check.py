"""Deep checks of a page table: what the constructors of its parts can not see."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import GeometryError
from kvtransfer.page_table import MAX_ADDRESS, MapperKind, RecurrentGroup, entry_addresses, view_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.page_table import LayerGroup, PageTable, PhysicalPool, PoolView

# Bound the work of one check: buffers of a group and of the table, and pairs of buffers and regions.
MAX_GROUP_ENTRIES = 1 << 14
MAX_TABLE_ENTRIES = 1 << 16
MAX_LOOKUPS = 1 << 24


def check_page_table(table: PageTable) -> None:
    """Raises GeometryError naming field and value; see PageTable.validate."""
    if not table.groups:
        raise GeometryError("groups", "()", "a page table needs at least one layer group")
    count = sum(len(view.entries) for group in table.groups for view in group.views)
    if count > MAX_TABLE_ENTRIES:
        raise GeometryError("groups", count, f"buffers; at most {MAX_TABLE_ENTRIES} are accepted")
    starts, ends = _sorted_regions(table)
    _layers_once(table)
    lookups = MAX_LOOKUPS
    for g, group in enumerate(table.groups):
        for v, view in enumerate(group.views):
            field = f"groups[{g}].views[{v}]"
            if view.pool >= len(table.pools):
                raise GeometryError(f"{field}.pool", view.pool, f"there are {len(table.pools)} pools")
            pool = table.pools[view.pool]
            _check_view(group, view, pool, field)
            _check_sizes(group, view, field)
            spans = view_spans(group, view)
            lookups = _check_inside_regions(pool, view, spans, starts, ends, field, lookups)
        _roles_once(group, f"groups[{g}]")
        _check_disjoint(table, group, f"groups[{g}]")


def _layers_once(table: PageTable) -> None:
    # A layer may have attention and a recurrent state side by side, but only one block table of each kind.
    seen: dict[bool, set[int]] = {True: set(), False: set()}
    for g, group in enumerate(table.groups):
        before = seen[isinstance(group, RecurrentGroup)]
        twice = before.intersection(group.global_layer_ids)
        if twice:
            raise GeometryError(f"groups[{g}].global_layer_ids", sorted(twice), "are in an earlier group too")
        before.update(group.global_layer_ids)


def _roles_once(group: LayerGroup, field: str) -> None:
    seen: dict[frozenset[str], set[int]] = {}
    for v, view in enumerate(group.views):
        places: list[int] = view.entries.layer.tolist()
        layers = {group.global_layer_ids[place] for place in places}
        before = seen.setdefault(view.roles, set())
        if not layers.isdisjoint(before):
            ids = sorted(layers & before)
            value = f"{{{', '.join(sorted(view.roles))}}} of layers {ids}"
            raise GeometryError(f"{field}.views[{v}].roles", value, "are in an earlier view of the group too")
        before.update(layers)


def _sorted_regions(table: PageTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not table.regions:
        raise GeometryError("regions", "()", "nothing is registered")
    kinds = sorted({region.memory_kind.name for region in table.regions})
    if len(kinds) > 1:
        raise GeometryError("regions.memory_kind", ", ".join(kinds), "one rank keeps its cache in one kind of memory")
    regions = sorted(table.regions, key=lambda region: region.base_address)
    for before, after in pairwise(regions):
        if before.end > after.base_address:
            value = f"{after.base_address:#x}"
            raise GeometryError("regions.base_address", value, f"overlaps the region at {before.base_address:#x}")
    starts = np.array([region.base_address for region in regions], np.int64)
    ends = np.array([region.end for region in regions], np.int64)
    return starts, ends


def _check_view(group: LayerGroup, view: PoolView, pool: PhysicalPool, field: str) -> None:
    entries = view.entries
    layers = len(group.global_layer_ids)
    if int(entries.layer.max()) >= layers:
        raise GeometryError(f"{field}.entries.layer", int(entries.layer.max()), f"the group has {layers} layers")
    # Python integers: nothing here can overflow before it has been compared.
    for offset, span in zip(entries.offset.tolist(), view_spans(group, view).tolist(), strict=True):
        if offset + span > pool.slot_bytes:
            raise GeometryError(f"{field}.entries", f"{offset} + {span}", f"leaves the slot of {pool.slot_bytes} bytes")
    last_layer = int(entries.layer.max()) * pool.layer_stride
    last = pool.base_address + last_layer + (pool.num_slots - 1) * pool.slot_stride + pool.slot_bytes
    if last > MAX_ADDRESS:
        raise GeometryError(f"{field}.pool", view.pool, "its last slot ends above 2^63 - 1")


def _check_sizes(group: LayerGroup, view: PoolView, field: str) -> None:
    sizes = view.entries.size.astype(np.int64)
    if view.mapper_kind is MapperKind.SECTIONED:
        want = view.rows * view.row_bytes
        wrong = sizes[sizes != want]
        if len(wrong):
            problem = f"the sections of {view.rows} rows are {want} bytes"
            raise GeometryError(f"{field}.entries.size", int(wrong[0]), problem)
    elif not isinstance(group, RecurrentGroup):
        parts = group.tokens_per_block
        if view.mapper_kind is not MapperKind.REPLICATED:
            parts *= len(view.kv_heads)
        # Eight bits a byte: a token of a head may be half a byte, but never a fraction of a bit.
        uneven = sizes[sizes * 8 % parts != 0]
        if len(uneven):
            problem = f"bytes do not divide evenly among {parts} tokens x heads"
            raise GeometryError(f"{field}.entries.size", int(uneven[0]), problem)
        _check_pitch(view, sizes, parts, field)
    elif view.pitch is not None:
        raise GeometryError(f"{field}.pitch", view.pitch, "belongs to attention groups")


def _check_pitch(view: PoolView, sizes: NDArray[np.int64], parts: int, field: str) -> None:
    if view.pitch is None:
        return
    broken = sizes[sizes % parts != 0]
    if len(broken):
        raise GeometryError(f"{field}.pitch", view.pitch, f"units of {broken[0]} / {parts} bytes need none")
    unit = int(sizes.max()) // parts
    if unit > view.pitch:
        raise GeometryError(f"{field}.pitch", view.pitch, f"units of {unit} bytes would overlap")


def _check_inside_regions(
    pool: PhysicalPool,
    view: PoolView,
    sizes: NDArray[np.int64],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    field: str,
    budget: int,
) -> int:
    """Returns what is left of `budget`, the number of (buffer, region) pairs that may be compared."""
    first = entry_addresses(pool, view.entries)
    span = np.int64((pool.num_slots - 1) * pool.slot_stride)
    # Most pools lie in one registration: then the first and the last slot decide for all slots between them.
    rest = np.flatnonzero(~_inside_one(first, sizes + span, starts, ends))
    low = np.searchsorted(ends, first[rest], side="right")
    high = np.searchsorted(starts, (first + span + sizes)[rest], side="left")
    budget -= int(np.maximum(high - low, 0).sum()) + len(rest)
    if budget < 0:
        raise GeometryError(f"{field}.pool", view.pool, "spreads too many buffers over too many regions")
    for index, near in zip(rest.tolist(), map(slice, low.tolist(), high.tolist()), strict=True):
        begin, size = int(first[index]), int(sizes[index])
        slot = _first_outside(begin, size, pool, starts[near], ends[near])
        if slot < pool.num_slots:
            value = f"{begin + slot * pool.slot_stride:#x} + {size}"
            problem = f"buffer {index} of slot {slot} is not inside one registered region"
            raise GeometryError(f"{field}.entries", value, problem)
    return budget


def _first_outside(
    begin: int, size: int, pool: PhysicalPool, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> int:
    """The first slot whose buffer at begin + slot * stride leaves every region, num_slots when there is none.

    Each region holds an interval of slots, in closed form: the work does not grow with their number.
    """
    stride, slots = pool.slot_stride, pool.num_slots
    low = np.maximum(-((begin - starts) // stride), 0)
    high = np.minimum((ends - size - begin) // stride + 1, slots)
    held = low < high
    low, high = low[held], high[held]
    gaps = np.flatnonzero(low > np.concatenate((np.zeros(1, np.int64), high[:-1]))) if len(low) else low
    if len(gaps):
        return 0 if gaps[0] == 0 else int(high[gaps[0] - 1])
    return int(high[-1]) if len(high) else 0


def _inside_one(
    begin: NDArray[np.int64], size: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.bool_]:
    region = np.searchsorted(starts, begin, side="right") - 1
    return (region >= 0) & (begin + size <= ends[region])


def _lane(group: LayerGroup, view: PoolView) -> NDArray[np.int64]:
    """Bytes of one unit of every buffer of a view with a pitch; of the buffer otherwise."""
    size = view.entries.size.astype(np.int64)
    if view.pitch is None or isinstance(group, RecurrentGroup):
        return size
    return size // view.units(group.tokens_per_block)


def _check_disjoint(table: PageTable, group: LayerGroup, field: str) -> None:
    """No byte of the group belongs to two (buffer, slot) pairs, or it would have two writers."""
    count = sum(len(view.entries) for view in group.views)
    if count > MAX_GROUP_ENTRIES:
        raise GeometryError(f"{field}.views", count, f"buffers; at most {MAX_GROUP_ENTRIES} are accepted")
    pools = [table.pools[view.pool] for view in group.views]
    base = np.concatenate([entry_addresses(p, v.entries) for p, v in zip(pools, group.views, strict=True)])
    size = np.concatenate([view_spans(group, v) for v in group.views])
    lane = np.concatenate([_lane(group, v) for v in group.views])
    lengths = [len(view.entries) for view in group.views]
    stride = np.repeat(np.array([pool.slot_stride for pool in pools], np.int64), lengths)
    slots = np.repeat(np.array([pool.num_slots for pool in pools], np.int64), lengths)
    pitch = np.repeat(np.array([view.pitch or 0 for view in group.views], np.int64), lengths)
    order = np.argsort(base, kind="stable")
    base, size, stride, slots = base[order], size[order], stride[order], slots[order]
    lane, pitch = lane[order], pitch[order]
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
        if pitch[i]:
            # Units of one pitch meet in every place or in none, when slots are a whole number of them apart.
            shift = gap % pitch[i]
            beside = (shift >= lane[i]) & (pitch[i] - shift >= lane[later])
            apart = (pitch[later] == pitch[i]) & (stride[i] % pitch[i] == 0) & beside
            below, above = below & ~apart, above & ~apart
        if (below | above).any():
            raise GeometryError(f"{field}.views", f"{int(base[i]):#x}", "two buffers share bytes")
