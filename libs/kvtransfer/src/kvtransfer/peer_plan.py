"""The plan of one (source rank, destination rank): made once when two instances meet, used for every request.

    symbolic   runs of one block (addresses in slot 0, strides)              build_plan
    a request  x block lists ─ broadcast ─▶ addresses ─ merge ─▶ RegionPairs plan.instantiate

Only the context side computes addresses for writes; both sides compute the same digest over (destination interval ->
writer) and the same expected extents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvtransfer.block_lists import check_blocks, select_blocks
from kvtransfer.compatibility import check_storage
from kvtransfer.errors import PeerIncompatible, PlanError
from kvtransfer.manifest import Need
from kvtransfer.mappers.intact import SlotRuns, concatenate, merge_slot_runs
from kvtransfer.overlap import destination_ranks
from kvtransfer.page_table import entry_addresses
from kvtransfer.pool_matching import GroupMatch, match_pools, view_layers
from kvtransfer.ports import Extent
from kvtransfer.regions import RegionPairs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvtransfer.page_table import PageTable
    from kvtransfer.ports import TokenRange
    from kvtransfer.rank_info import InstanceInfo, RankInfo


@dataclass(frozen=True, slots=True)
class Interval:
    """Layers [layer_begin, layer_end) and heads [head_begin, head_end) of one view of one destination group."""

    layer_group: int
    view: int
    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """One matched pair of layer groups. Block ids lie in [0, src_blocks) and [0, dst_blocks)."""

    src_group: int
    dst_group: int
    tokens_per_block: int
    src_blocks: int
    dst_blocks: int
    runs: SlotRuns


@dataclass(frozen=True, slots=True, eq=False)
class PeerPlan:
    """Frozen. `intervals`: what src_rank is the writer of on dst_rank. Region starts are sorted int64."""

    src_rank: int
    dst_rank: int
    groups: tuple[GroupPlan, ...]
    intervals: tuple[Interval, ...]
    src_region_starts: NDArray[np.int64]
    dst_region_starts: NDArray[np.int64]

    def instantiate(
        self,
        src_blocks: Mapping[int, NDArray[np.int32]],
        dst_blocks: Mapping[int, NDArray[np.int32]],
        tokens: TokenRange,
    ) -> RegionPairs:
        """Addresses of one request, merged where both sides are contiguous inside one registered region.

        src_blocks: per source layer group the blocks from token 0 of the prompt (longer is fine). dst_blocks: per
        destination layer group exactly the blocks of `tokens`. A destination of -1 wants nothing; a source of -1 is an
        error unless nothing is wanted there. The last block is sent whole. Raises PlanError before anything is
        computed.
        """
        picked = [
            (group, *select_blocks(group, src_blocks, dst_blocks, tokens)) for group in self.groups if len(tokens) > 0
        ]
        parts = [_broadcast(group.runs, src, dst) for group, src, dst in picked if len(src)]
        if not parts:
            return RegionPairs.empty()
        pairs = RegionPairs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        if len(parts) > 1:
            _check_one_writer(pairs)
        return _merge(pairs, self.src_region_starts, self.dst_region_starts)

    def check_destination(self, dst_blocks: Mapping[int, NDArray[np.int32]], tokens: TokenRange) -> None:
        """Raises PlanError unless the lists fit the plan: what the receiving side can check before it asks."""
        for group in self.groups:
            if len(tokens) > 0:
                check_blocks(group, dst_blocks, tokens)

    def extents(self, tokens: TokenRange) -> tuple[Extent, ...]:
        """What src_rank delivers to dst_rank for `tokens`; empty for an empty range."""
        if len(tokens) == 0:
            return ()
        return tuple(Extent(i.layer_group, i.view, tokens, i.layer_begin, i.layer_end) for i in self.intervals)

    @property
    def digest(self) -> bytes:
        """xxh3_128 over (destination interval -> writer), one row per layer; runs and merging do not enter."""
        rows = sorted(
            (self.dst_rank, i.layer_group, i.view, layer, i.head_begin, i.head_end, self.src_rank)
            for i in self.intervals
            for layer in range(i.layer_begin, i.layer_end)
        )
        return xxhash.xxh3_128_digest(np.array(rows, dtype="<u4").tobytes())


def build_plan(local: RankInfo, peer: RankInfo) -> PeerPlan:
    """Plan for writes from `local` to `peer`. Both page tables have been validated.

    Raises PeerIncompatible with every reason when the storages can not be mapped.
    """
    problems = check_storage(local, peer)
    if problems:
        raise PeerIncompatible(problems)
    src, dst = local.page_table, peer.page_table
    matching = match_pools(src, dst)
    return PeerPlan(
        src_rank=local.rank,
        dst_rank=peer.rank,
        groups=tuple(_group_plan(src, dst, match) for match in matching.groups),
        intervals=tuple(interval for match in matching.groups for interval in _intervals(dst, match)),
        src_region_starts=np.array(sorted(region.base_address for region in src.regions), np.int64),
        dst_region_starts=np.array(sorted(region.base_address for region in dst.regions), np.int64),
    )


def build_instance_plans(context: InstanceInfo, generation: InstanceInfo) -> tuple[PeerPlan, ...]:
    """All plans of a pair in order of (src_rank, dst_rank). Raises PeerIncompatible."""
    return tuple(plan for rank in context.ranks for plan in build_rank_plans(rank, generation))


def build_rank_plans(rank: RankInfo, generation: InstanceInfo) -> tuple[PeerPlan, ...]:
    """The plans of one context rank, by dst_rank. Raises PeerIncompatible or PlanError."""
    ranks = destination_ranks(rank.topology, generation.ranks[0].topology)
    return tuple(build_plan(rank, generation.ranks[dst]) for dst in ranks)


def rank_digest(plans: Iterable[PeerPlan]) -> bytes:
    """Digest of one context rank over its plans in order of dst_rank: `PeerLoaded.plan_digest`."""
    return xxhash.xxh3_128_digest(b"".join(plan.digest for plan in sorted(plans, key=lambda plan: plan.dst_rank)))


def combine_digests(digests: Sequence[bytes]) -> bytes:
    """Digest of an instance from those of its context ranks in flat order: `Welcome.plan_digest`."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def plan_digest(context: InstanceInfo, generation: InstanceInfo) -> bytes:
    """The same value computed from both descriptions alone; either side may. Raises PeerIncompatible."""
    return combine_digests([rank_digest(build_rank_plans(rank, generation)) for rank in context.ranks])


def expected_extents(plan: PeerPlan, tokens: TokenRange) -> tuple[Extent, ...]:
    """What the receiver needs from plan.src_rank on plan.dst_rank."""
    return plan.extents(tokens)


def expected_need(plans: Iterable[PeerPlan], tokens: TokenRange) -> Need:
    """What a generation instance needs from all writers for `tokens`."""
    return Need.of({(plan.src_rank, plan.dst_rank): plan.extents(tokens) for plan in plans})


def _group_plan(src: PageTable, dst: PageTable, match: GroupMatch) -> GroupPlan:
    mine, yours = src.groups[match.mine], dst.groups[match.yours]
    parts: list[SlotRuns] = []
    for v, w in match.views:
        a, b = mine.views[v], yours.views[w]
        pool_a, pool_b = src.pools[a.pool], dst.pools[b.pool]
        left, right = view_layers(mine, a), view_layers(yours, b)
        # The n-th buffer of a layer is the n-th buffer of the same layer on the other side, wherever each of them lies.
        pick_a = np.array([i for layer in sorted(left) for i in left[layer]])
        pick_b = np.array([i for layer in sorted(left) for i in right[layer]])
        count = len(pick_a)
        parts.append(
            SlotRuns(
                src=entry_addresses(pool_a, a.entries)[pick_a],
                dst=entry_addresses(pool_b, b.entries)[pick_b],
                length=a.entries.size.astype(np.int64)[pick_a],
                src_stride=np.full(count, pool_a.slot_stride, np.int64),
                dst_stride=np.full(count, pool_b.slot_stride, np.int64),
            )
        )
    runs = concatenate(parts)
    # With several registrations the borders may cut slots anywhere; then only the addresses of a request can tell.
    if len(src.regions) == 1 and len(dst.regions) == 1:
        runs = merge_slot_runs(runs)
    blocks = src.num_blocks(match.mine), dst.num_blocks(match.yours)
    return GroupPlan(match.mine, match.yours, mine.tokens_per_block, *blocks, runs)


def _intervals(dst: PageTable, match: GroupMatch) -> list[Interval]:
    group = dst.groups[match.yours]
    intervals: list[Interval] = []
    for _, w in sorted(match.views, key=lambda pair: pair[1]):
        view = group.views[w]
        layers = sorted(view_layers(group, view))
        begin = layers[0]
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            if following != layer + 1:
                heads = view.kv_heads
                intervals.append(Interval(match.yours, w, begin, layer + 1, heads.begin, heads.end))
                begin = following if following is not None else begin
    return intervals


Columns = tuple["NDArray[np.int64]", "NDArray[np.int64]", "NDArray[np.int64]"]


def _broadcast(runs: SlotRuns, src: NDArray[np.int64], dst: NDArray[np.int64]) -> Columns:
    """Runs [R, 1] x blocks [1, B] -> R*B rows."""
    shape = (len(runs), len(src))
    return (
        (runs.src[:, None] + runs.src_stride[:, None] * src).ravel(),
        (runs.dst[:, None] + runs.dst_stride[:, None] * dst).ravel(),
        np.broadcast_to(runs.length[:, None], shape).ravel(),
    )


def _check_one_writer(pairs: RegionPairs) -> None:
    """Groups may share a pool, each with block ids of its own: then only addresses tell that lists collide."""
    order = np.argsort(pairs.dst)
    begin, length = pairs.dst[order], pairs.lengths[order]
    clash = np.flatnonzero(begin[:-1] + length[:-1] > begin[1:])
    if len(clash):
        raise PlanError(f"destination blocks of two layer groups share the byte at {int(begin[clash[0] + 1]):#x}")


def _merge(pairs: RegionPairs, src_starts: NDArray[np.int64], dst_starts: NDArray[np.int64]) -> RegionPairs:
    """Joins runs that follow each other on both sides and do not meet at the border of a registered region."""
    src, dst, length = pairs.src, pairs.dst, pairs.lengths
    if (src[1:] < src[:-1]).any():
        order = np.argsort(src, kind="stable")
        src, dst, length = src[order], dst[order], length[order]
    joined = (src[:-1] + length[:-1] == src[1:]) & (dst[:-1] + length[:-1] == dst[1:])
    for starts, addresses in ((src_starts, src), (dst_starts, dst)):
        if len(starts) > 1:
            region = np.searchsorted(starts, addresses, side="right")
            joined &= region[:-1] == region[1:]
    heads = np.flatnonzero(np.concatenate(([True], ~joined)))
    return RegionPairs(src[heads], dst[heads], np.add.reduceat(length, heads))
