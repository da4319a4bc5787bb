"""Block ids or a slot -> where their bytes are, for one view of a page table. -1 entries are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import PlanError
from kvtransfer.page_table import AttentionGroup, entry_addresses
from kvtransfer.regions import Regions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.page_table import LayerGroup, PageTable, PoolView


def extract(block_ids: NDArray[np.int32], table: PageTable, group: int, view: int) -> Regions:
    """Every buffer of the view for every block: buffers one after the other, each with its blocks in the given order.

    Raises PlanError for ids outside [-1, num_slots).
    """
    chosen = table.groups[group].views[view]
    pool = table.pools[chosen.pool]
    if len(block_ids) and not (int(block_ids.min()) >= -1 and int(block_ids.max()) < pool.num_slots):
        wrong = block_ids[(block_ids < -1) | (block_ids >= pool.num_slots)]
        raise PlanError(f"block {int(wrong[0])} is not in a pool of {pool.num_slots} slots, -1 is none")
    blocks = block_ids[block_ids >= 0].astype(np.int64)
    return _regions(table, table.groups[group], chosen, blocks)


def extract_slot(slot: int, table: PageTable, group: int, view: int) -> Regions:
    """The recurrent state of one sequence: one run for each buffer, in entry order. Raises PlanError."""
    return extract(np.array([slot], np.int32), table, group, view)


def _regions(table: PageTable, group: LayerGroup, view: PoolView, blocks: NDArray[np.int64]) -> Regions:
    pool = table.pools[view.pool]
    addresses = np.add.outer(entry_addresses(pool, view.entries), blocks * pool.slot_stride)
    lengths = np.broadcast_to(view.entries.size.astype(np.int64)[:, None], addresses.shape)
    if view.pitch is not None and isinstance(group, AttentionGroup):
        units = view.units(group.tokens_per_block)
        addresses = np.add.outer(addresses, np.arange(units) * np.int64(view.pitch))
        lengths = np.broadcast_to(lengths[..., None] // units, addresses.shape)
    return Regions(addresses.reshape(-1), np.ascontiguousarray(lengths).reshape(-1))
