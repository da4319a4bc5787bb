"""The plan of one (source rank, destination rank): made once when two instances meet, used for every request.

    symbolic   runs of one block (addresses in slot 0, strides, steps)              build_plan
    a request  x pieces of blocks ─ outer sums ─▶ Transfer: strided or every run    plan.resolve, plan.instantiate

Only the context side computes addresses for writes; both sides compute the same digest over (destination interval ->
writer) and the same expected extents.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.block_lists import destination_list
from kvtransfer.compatibility import check_storage
from kvtransfer.digest import atoms_digest
from kvtransfer.digest import combine_digests as combine_digests
from kvtransfer.digest import rank_digest as rank_digest
from kvtransfer.errors import PeerIncompatible
from kvtransfer.group_plan import group_plans
from kvtransfer.instantiate import cut_window, grids_of, group_window, place, wanted_from
from kvtransfer.manifest import Need
from kvtransfer.ports import Extent
from kvtransfer.relation import relate
from kvtransfer.sharing import Sharing, check_addresses, check_ids, sharing_groups
from kvtransfer.storage_check import check_instances
from kvtransfer.transfer import Transfer
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtransfer.group_plan import GroupPlan
    from kvtransfer.instantiate import Begins, BlockLists, Located
    from kvtransfer.overlap import Atoms
    from kvtransfer.page_table import PageTable
    from kvtransfer.ports import TokenRange
    from kvtransfer.rank_info import InstanceInfo, RankInfo
    from kvtransfer.regions import RegionPairs
    from kvtransfer.relation import Relation

log = logging.getLogger(__name__)

# At 9 us a descriptor this is half a second in the agent: such a pair wants the bounce path, or equal layouts.
MANY_FRAGMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Interval:
    """Global layers [layer_begin, layer_end) of one view of one destination group."""

    layer_group: int
    view: int
    layer_begin: int
    layer_end: int


@dataclass(frozen=True, eq=False)
class PeerPlan:
    """Frozen. `intervals`: where src_rank is a writer on dst_rank; which heads and tokens of them follows from the two
    ranks. `*_dp`: attention-dp groups. A request is between one group of either side."""

    src_rank: int
    dst_rank: int
    src_dp: int
    dst_dp: int
    groups: tuple[GroupPlan, ...]
    intervals: tuple[Interval, ...]
    digest: bytes
    tables: tuple[PageTable, PageTable]

    def resolve(
        self,
        src_blocks: BlockLists,
        dst_blocks: BlockLists,
        tokens: TokenRange | Chunk,
        *,
        src_begins: Begins = None,
        dst_begins: Begins = None,
    ) -> Transfer:
        """What a chunk moves, nothing multiplied out. A bare TokenRange is a whole prompt in one chunk.

        *_blocks: int32 lists by layer group; blocks[0] holds token *_begins[group], or the first token after it that
        the rank has. Begins default to 0 on the source and to the begin of the prompt's window on the destination. The
        destination lists exactly the blocks up to the end of the prompt, -1 where it wants nothing; the source at least
        what is read, -1 where nothing is. Recurrent groups list one slot. Raises PlanError before anything is computed.
        """
        return self.moves(self.locate(src_blocks, dst_blocks, Chunk.of(tokens), src_begins, dst_begins))

    def locate(
        self, src_blocks: BlockLists, dst_blocks: BlockLists, chunk: Chunk, src_begins: Begins, dst_begins: Begins
    ) -> Located:
        """Where everything lies that a chunk moves. Arguments and errors as in `resolve`."""
        if chunk.prompt.begin == chunk.prompt.end:
            return ()
        placed = ((g, place(g, src_blocks, dst_blocks, chunk, src_begins, dst_begins)) for g in self.groups)
        located = tuple((group, pieces) for group, pieces in placed if len(pieces))
        check_ids(self._sharing, dst_blocks)
        if any(how is Sharing.ADDRESSES for *_, how in self._sharing):
            check_addresses(self.moves(located).pairs())
        return located

    def moves(self, located: Located) -> Transfer:
        """What of a chunk has been located, or some groups of it."""
        return Transfer(
            tuple(grid for group, pieces in located for grid in grids_of(group, pieces)), self._region_starts
        )

    def instantiate(
        self,
        src_blocks: BlockLists,
        dst_blocks: BlockLists,
        tokens: TokenRange | Chunk,
        *,
        src_begins: Begins = None,
        dst_begins: Begins = None,
    ) -> RegionPairs:
        """`resolve`, every run written out; says so in the log when there are very many."""
        transfer = self.resolve(src_blocks, dst_blocks, tokens, src_begins=src_begins, dst_begins=dst_begins)
        if transfer.fragments > MANY_FRAGMENTS:
            log.warning(
                "transfer in very many fragments",
                extra={
                    "src_rank": self.src_rank,
                    "dst_rank": self.dst_rank,
                    "fragments": transfer.fragments,
                    "bytes": transfer.nbytes,
                },
            )
        return transfer.pairs()

    def check_destination(self, dst_blocks: BlockLists, tokens: TokenRange | Chunk, dst_begins: Begins = None) -> None:
        """Raises PlanError unless the lists fit the plan: what the receiving side can check before it asks."""
        chunk = Chunk.of(tokens)
        for group in self.groups:
            begin = wanted_from(chunk, dst_begins, group.dst.number)
            if begin < chunk.prompt.end:
                destination_list(group, dst_blocks, begin, chunk.prompt.end)
        check_ids(self._sharing, dst_blocks)

    def extents(self, tokens: TokenRange | Chunk, dst_begins: Begins = None) -> tuple[Extent, ...]:
        """What src_rank reports to dst_rank for a chunk: nothing when the two share no token of the prompt, otherwise
        all tokens of the chunk's window, also where none of them is in the shard of the source."""
        chunk = Chunk.of(tokens)
        windows: dict[int, TokenRange] = {}
        for group in self.groups:
            window = group_window(group, chunk, dst_begins)
            if len(window) and _shares_tokens(group, chunk, dst_begins):
                windows[group.dst.number] = window.tokens
        return tuple(
            Extent(i.layer_group, i.view, windows[i.layer_group], i.layer_begin, i.layer_end)
            for i in self.intervals
            if i.layer_group in windows
        )

    def prepare(self) -> PeerPlan:
        """Makes the runs now instead of at the first request. Raises UnalignedSlice."""
        for group in self.groups:
            group.prepare()
        _ = self._sharing, self._region_starts
        return self

    @cached_property
    def _sharing(self) -> tuple[tuple[int, int, Sharing], ...]:
        return sharing_groups(self.tables[1], [group.dst.number for group in self.groups])

    @cached_property
    def _region_starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        sides = [side for group in self.groups for side in (group.buffers.src, group.buffers.dst)]
        if all((side.region >= 0).all() for side in sides):
            return None
        src, dst = (
            np.array(sorted(region.base_address for region in table.regions), np.int64) for table in self.tables
        )
        return src, dst


def _shares_tokens(group: GroupPlan, chunk: Chunk, dst_begins: Begins) -> bool:
    if group.recurrent or (group.src.shard.whole and group.dst.shard.whole):
        return True
    whole = Chunk(chunk.prompt, chunk.prompt)
    return len(cut_window(group, group_window(group, whole, dst_begins), chunk.prompt.end)) > 0


def build_plan(local: RankInfo, peer: RankInfo) -> PeerPlan:
    """Plan for writes from `local` to `peer` as if they were alone: `local` writes everything that both hold.

    Both page tables have been validated. Raises PeerIncompatible with every reason when the storages can not be mapped.
    """
    problems = check_storage(local, peer)
    if problems:
        raise PeerIncompatible(problems)
    relation = relate([local], [peer], "", seed_compat=True)
    return _plan(relation, local, peer).prepare()


def build_instance_plans(
    context: InstanceInfo, generation: InstanceInfo, *, seed_compat: bool = False
) -> tuple[PeerPlan, ...]:
    """All plans of a pair in order of (src_rank, dst_rank). Raises PeerIncompatible."""
    relation = _related(context.ranks, generation, seed_compat)
    return tuple(_plan(relation, context.ranks[a], generation.ranks[b]) for a, b in relation.pairs())


def build_rank_plans(
    rank: RankInfo, generation: InstanceInfo, context: Sequence[RankInfo] = (), *, seed_compat: bool = False
) -> tuple[PeerPlan, ...]:
    """The plans of one context rank, by dst_rank, ready for requests. `context`: all ranks of its instance, in flat
    order; empty = it is the only one. Raises PeerIncompatible."""
    relation = _related(context or (rank,), generation, seed_compat)
    return tuple(_plan(relation, rank, generation.ranks[b]).prepare() for a, b in relation.pairs() if a == rank.rank)


def build_source_plans(
    context: InstanceInfo, generation: InstanceInfo, rank: int, *, seed_compat: bool = False
) -> tuple[PeerPlan, ...]:
    """The plans of all writers to one generation rank, by src_rank, ready for requests. Raises PeerIncompatible."""
    relation = _related(context.ranks, generation, seed_compat)
    info = generation.ranks[rank]
    return tuple(_plan(relation, context.ranks[a], info).prepare() for a, b in relation.pairs() if b == rank)


def plan_digest(context: InstanceInfo, generation: InstanceInfo, *, seed_compat: bool = False) -> bytes:
    """`Welcome.plan_digest` computed from both descriptions alone; either side may. Raises PeerIncompatible."""
    relation = _related(context.ranks, generation, seed_compat)
    by_rank: dict[int, list[PeerPlan]] = {rank.rank: [] for rank in context.ranks}
    for a, b in relation.pairs():
        by_rank[a].append(_plan(relation, context.ranks[a], generation.ranks[b]))
    return combine_digests([rank_digest(plans) for plans in by_rank.values()])


def expected_extents(plan: PeerPlan, tokens: TokenRange) -> tuple[Extent, ...]:
    """What the receiver needs from plan.src_rank on plan.dst_rank."""
    return plan.extents(tokens)


def expected_need(
    plans: Iterable[PeerPlan],
    tokens: TokenRange,
    begins: Mapping[tuple[int, int], int] | None = None,
    *,
    src_dp: int | None = None,
    dst_dp: int | None = None,
) -> Need:
    """What a generation instance needs from all writers for a prompt. `begins`: (dst_rank, layer group) -> first token
    wanted. `*_dp` choose the attention-dp groups of the request, None = whatever is in `plans`."""
    by_rank: dict[int, dict[int, int]] = {}
    for (rank, group), begin in (begins or {}).items():
        by_rank.setdefault(rank, {})[group] = begin
    return Need.of(
        {
            (plan.src_rank, plan.dst_rank): plan.extents(tokens, by_rank.get(plan.dst_rank))
            for plan in plans
            if src_dp in (None, plan.src_dp) and dst_dp in (None, plan.dst_dp)
        }
    )


def _related(context: Sequence[RankInfo], generation: InstanceInfo, seed_compat: bool) -> Relation:
    problems = check_instances(context, generation.ranks)
    if problems:
        raise PeerIncompatible(problems)
    return relate(context, generation.ranks, generation.instance_id, seed_compat=seed_compat)


def _plan(relation: Relation, local: RankInfo, peer: RankInfo) -> PeerPlan:
    atoms = relation.of(local.rank, peer.rank)
    return PeerPlan(
        src_rank=local.rank,
        dst_rank=peer.rank,
        src_dp=local.topology.tp_rank // local.topology.tp_per_dp,
        dst_dp=peer.topology.tp_rank // peer.topology.tp_per_dp,
        groups=group_plans(relation, local, peer),
        intervals=_intervals(relation, atoms),
        digest=atoms_digest(relation.src, relation.dst, atoms),
        tables=(local.page_table, peer.page_table),
    )


def _intervals(relation: Relation, atoms: Atoms) -> tuple[Interval, ...]:
    """Layers of each view that follow each other, whatever heads of them."""
    dst = relation.dst
    part = dst.part[atoms.dst_row]
    columns = dst.column("group")[part], dst.column("view")[part], dst.layer[atoms.dst_row]
    order = np.lexsort(columns[::-1])
    group, view, layer = (column[order] for column in columns)
    same = (group[1:] == group[:-1]) & (view[1:] == view[:-1])
    new = np.ones(len(order), np.bool_)
    new[1:] = ~(same & (layer[1:] - layer[:-1] <= 1))
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(order))[: len(first)] - 1
    spans: list[tuple[int, int, int, int]] = np.column_stack(
        (group[first], view[first], layer[first], layer[last] + 1)
    ).tolist()
    return tuple(Interval(*span) for span in spans)
