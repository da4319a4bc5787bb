"""A matched pair of layer groups of two ranks: how tokens lie in blocks on both sides, and the runs between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.buffer_pairs import buffer_pairs
from kvtransfer.bundles import bundle, bundle_whole
from kvtransfer.holdings import shard_of
from kvtransfer.mappers import map_any, map_whole
from kvtransfer.page_table import AttentionGroup
from kvtransfer.run_table import UnalignedSlice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.bundles import Bundle
    from kvtransfer.overlap import Atoms
    from kvtransfer.packed import RunPlaces
    from kvtransfer.page_table import LayerGroup, PageTable
    from kvtransfer.rank_info import RankInfo
    from kvtransfer.relation import Relation
    from kvtransfer.run_table import RunTable
    from kvtransfer.sharding import Shard


@dataclass(frozen=True, slots=True)
class GroupSide:
    """One side of a group: its number, tokens of a block (1 for a recurrent group), number of blocks, token shard."""

    number: int
    block: int
    blocks: int
    shard: Shard


@dataclass(frozen=True, slots=True, eq=False)
class BufferSource:
    """What the buffers of a group are made from. `tables`: of the source and of the destination rank."""

    relation: Relation
    atoms: Atoms
    tables: tuple[PageTable, PageTable]


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """`group`: the destination's. Runs are made on first use: the receiving side never needs them."""

    src: GroupSide
    dst: GroupSide
    group: LayerGroup
    source: BufferSource

    @cached_property
    def buffers(self) -> BufferPairs:
        """The matched buffers."""
        relation = self.source.relation
        return buffer_pairs(relation.src, relation.dst, self.source.atoms, self.source.tables)

    @property
    def recurrent(self) -> bool:
        """One slot a sequence instead of blocks of tokens."""
        return not isinstance(self.group, AttentionGroup)

    @property
    def aligned_blocks(self) -> bool:
        """A block holds the same number of tokens on both sides, so that blocks can move whole."""
        return self.src.block == self.dst.block

    @property
    def grain(self) -> int:
        """Tokens between two places where a block may be cut, for prompts and reused prefixes in whole blocks."""
        if self.recurrent or (self.aligned_blocks and self.src.shard.whole and self.dst.shard.whole):
            return self.src.block
        grains = [one.shard.sharding.granularity for one in (self.src, self.dst) if one.shard.sharding is not None]
        return gcd(self.src.block, self.dst.block, *grains)

    @cached_property
    def whole_runs(self) -> RunTable:
        """Runs of a whole block, one for each buffer or part of it. Raises UnalignedSlice."""
        return map_whole(self.buffers)

    @cached_property
    def cut_runs(self) -> RunTable:
        """Runs that may begin at any token. Raises UnalignedSlice."""
        return map_any(self.buffers)

    @cached_property
    def whole(self) -> tuple[Bundle, ...]:
        """`whole_runs`, joined. Raises UnalignedSlice."""
        runs = self.whole_runs
        if not runs.aligned(self.src.block):
            raise self._unaligned()
        return bundle_whole(runs, self.src.block)

    @cached_property
    def cut(self) -> tuple[Bundle, ...]:
        """`cut_runs`. Raises UnalignedSlice."""
        return bundle(self.cut_runs)

    @cached_property
    def layer_of_buffer(self) -> NDArray[np.int64]:
        """Global layer of each buffer by its number in packing order."""
        pairs = self.buffers
        layers = np.zeros(int(pairs.buffer.max()) + 1, np.int64)
        np.maximum.at(layers, pairs.buffer, pairs.layer)
        return layers

    @cached_property
    def places(self) -> dict[tuple[bool, bool], RunPlaces]:
        """Where the runs lie in the packed range and on a side, by (of whole blocks, on the source): see `packing`."""
        return {}

    @cached_property
    def bits_per_token(self) -> int:
        """Bits of a token, or of a state, over all buffers."""
        return int(self.any_runs.unit.sum())

    @property
    def any_runs(self) -> RunTable:
        """Whichever runs requests need most."""
        return self.whole_runs if self.aligned_blocks else self.cut_runs

    def full_blocks(
        self, src_phase: NDArray[np.int64], dst_phase: NDArray[np.int64], count: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which pieces are a whole block on both sides."""
        if not self.aligned_blocks:
            return np.zeros(len(count), np.bool_)
        return (src_phase == 0) & (dst_phase == 0) & (count == self.src.block)

    @property
    def odd_sizes(self) -> bool:
        """Some token of some head is not made of whole bytes."""
        return not self.recurrent and bool((self.buffers.src.unit_bits % 8).any())

    @cached_property
    def byte_grained(self) -> bool:
        """A cut after any token falls between bytes."""
        return self.recurrent or self.cut_runs.aligned(1)

    def prepare(self) -> None:
        """Makes the runs that requests will use. Raises UnalignedSlice when a slice is not made of whole bytes."""
        if self.aligned_blocks:
            _ = self.whole
        if self.grain != self.src.block or not self.aligned_blocks:
            if not self.cut_runs.aligned(self.grain):
                raise self._unaligned()
            _ = self.cut

    def _unaligned(self) -> UnalignedSlice:
        bits = self.buffers.src.unit_bits
        worst = int(np.argmax(bits % 8 != 0))
        unit = int(bits[worst])
        sides = [
            f"{int(side.size[worst])} bytes of {int(side.tokens[worst])} tokens, {unit} bits a token of a head"
            for side in (self.buffers.src, self.buffers.dst)
        ]
        return UnalignedSlice(*sides)


def group_plans(relation: Relation, local: RankInfo, peer: RankInfo) -> tuple[GroupPlan, ...]:
    """Everything `local` writes to `peer`, by destination group."""
    atoms = relation.of(local.rank, peer.rank)
    tables = local.page_table, peer.page_table
    src_group = relation.src.column("group")[relation.src.part[atoms.src_row]]
    dst_group = relation.dst.column("group")[relation.dst.part[atoms.dst_row]]
    plans: list[GroupPlan] = []
    numbers: list[int] = np.unique(dst_group).tolist()
    for number in numbers:
        chosen = np.flatnonzero(dst_group == number)
        mine = _side(local, int(src_group[chosen[0]]))
        source = BufferSource(relation, atoms.take(chosen), tables)
        plans.append(GroupPlan(mine, _side(peer, number), peer.page_table.groups[number], source))
    return tuple(plans)


def _side(info: RankInfo, number: int) -> GroupSide:
    group = info.page_table.groups[number]
    block = group.tokens_per_block if isinstance(group, AttentionGroup) else 1
    return GroupSide(number, block, info.page_table.num_blocks(number), shard_of(group, info.topology))
