"""Geometry of one rank's KV storage: registered memory, pools in it, layer groups over the pools. Frozen values.

`pools` and `layer_groups` define the parts; everything a user of a page table needs is exported here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.layer_groups import AttentionGroup as AttentionGroup
from kvtransfer.layer_groups import LayerGroup as LayerGroup
from kvtransfer.layer_groups import RecurrentGroup as RecurrentGroup
from kvtransfer.layer_groups import ShardingKind as ShardingKind
from kvtransfer.layer_groups import TokenSharding as TokenSharding
from kvtransfer.layer_groups import view_spans as view_spans
from kvtransfer.pools import MAX_ADDRESS as MAX_ADDRESS
from kvtransfer.pools import BufferEntries as BufferEntries
from kvtransfer.pools import HeadInterval as HeadInterval
from kvtransfer.pools import MapperKind as MapperKind
from kvtransfer.pools import MemoryKind as MemoryKind
from kvtransfer.pools import PhysicalPool as PhysicalPool
from kvtransfer.pools import PoolView as PoolView
from kvtransfer.pools import RegisteredRegion as RegisteredRegion
from kvtransfer.pools import Section as Section
from kvtransfer.pools import entry_addresses as entry_addresses


@dataclass(frozen=True, slots=True)
class PageTable:
    """All KV storage of one rank, whichever cache manager made it. `validate` before use.

    `extra`: fields of a newer release as they came over the wire, kept for whoever gets the page table from here.
    """

    regions: tuple[RegisteredRegion, ...]
    pools: tuple[PhysicalPool, ...]
    groups: tuple[LayerGroup, ...]
    extra: bytes = b""

    @property
    def memory_kind(self) -> MemoryKind:
        """Where the cache lies; DRAM for a rank without any. `validate` has seen that it is one kind."""
        return self.regions[0].memory_kind if self.regions else MemoryKind.DRAM

    def validate(self) -> None:
        """Raises GeometryError unless every buffer of every slot lies inside exactly one registered region, no two
        buffers of a group share a byte, all sizes divide exactly and all addresses stay below 2^63."""
        from kvtransfer.page_table_check import check_page_table

        check_page_table(self)

    def num_blocks(self, group: int) -> int:
        """Block ids (or slots) of the group lie in [0, num_blocks): the smallest slot count among its pools."""
        return min(self.pools[view.pool].num_slots for view in self.groups[group].views)
