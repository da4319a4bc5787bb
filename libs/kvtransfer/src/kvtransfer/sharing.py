"""Destination layer groups in the same memory, each with block ids of its own: their lists must not collide."""

from __future__ import annotations

from enum import Enum
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import PlanError
from kvtransfer.page_table import entry_addresses, view_spans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtransfer.page_table import PageTable
    from kvtransfer.regions import RegionPairs


class Sharing(Enum):
    """How two groups of a page table meet in memory."""

    NONE = 0
    # The same block id in both is the same memory; different ids never are.
    IDS = 1
    # Only addresses can tell.
    ADDRESSES = 2


def sharing_groups(table: PageTable, groups: Sequence[int]) -> tuple[tuple[int, int, Sharing], ...]:
    """Every pair of `groups` that has memory in common."""
    found = ((a, b, sharing(table, a, b)) for a, b in combinations(sorted(groups), 2))
    return tuple(pair for pair in found if pair[2] is not Sharing.NONE)


def sharing(table: PageTable, a: int, b: int) -> Sharing:
    """How the blocks of groups `a` and `b` meet."""
    mine, yours = _spans(table, a), _spans(table, b)
    worst = Sharing.NONE
    for p, (begin, end) in mine.items():
        for q, (first, last) in yours.items():
            if end <= first or last <= begin:
                continue
            pool = table.pools[p]
            layered = pool.layer_stride and pool.layer_stride < pool.num_slots * pool.slot_stride
            if p != q or layered:
                return Sharing.ADDRESSES
            if same_slot(table, a, b, p):
                worst = Sharing.IDS
    return worst


def check_ids(pairs: Sequence[tuple[int, int, Sharing]], lists: Mapping[int, NDArray[np.int32]]) -> None:
    """Raises PlanError when two groups that share memory name the same destination block."""
    for a, b, how in pairs:
        if how is Sharing.IDS and a in lists and b in lists:
            both = np.intersect1d(lists[a][lists[a] >= 0], lists[b][lists[b] >= 0])
            if len(both):
                raise PlanError(f"destination groups {a} and {b} share memory and both name block {int(both[0])}")


def check_addresses(pairs: RegionPairs) -> None:
    """Raises PlanError when a destination byte would be written twice."""
    order = np.argsort(pairs.dst)
    begin, length = pairs.dst[order], pairs.lengths[order]
    clash = np.flatnonzero(begin[:-1] + length[:-1] > begin[1:])
    if len(clash):
        raise PlanError(f"destination blocks of two layer groups share the byte at {int(begin[clash[0] + 1]):#x}")


def _spans(table: PageTable, group: int) -> dict[int, tuple[int, int]]:
    """Pool -> [first byte, end) of everything the group keeps in it."""
    spans: dict[int, tuple[int, int]] = {}
    for view in table.groups[group].views:
        pool = table.pools[view.pool]
        first = entry_addresses(pool, view.entries)
        begin = int(first.min())
        end = int((first + view_spans(table.groups[group], view)).max()) + (pool.num_slots - 1) * pool.slot_stride
        known = spans.get(view.pool, (begin, end))
        spans[view.pool] = (min(begin, known[0]), max(end, known[1]))
    return spans


def same_slot(table: PageTable, a: int, b: int, pool: int | None = None) -> bool:
    """True when slot n of group `a` and slot n of another group `b` have a byte in common: in `pool`, or in any."""
    spans = [
        np.stack((begin, begin + view_spans(table.groups[group], view)), axis=1)
        for group in (a, b)
        for view in table.groups[group].views
        if pool is None or view.pool == pool
        for begin in (entry_addresses(table.pools[view.pool], view.entries),)
    ]
    every = np.concatenate(spans)
    every = every[np.argsort(every[:, 0])]
    return bool((np.maximum.accumulate(every[:-1, 1]) > every[1:, 0]).any())
