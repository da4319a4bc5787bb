"""Plans a case, runs the plans of all source ranks chunk by chunk, and compares every byte and every extent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.compare import compare_bytes, compare_need, compare_tokens, tokens_of
from kv_oracle.expected import source_memory
from kv_oracle.memory import NOTHING, Memory, execute
from kv_oracle.packed import check_other_forms
from kv_oracle.request import describe
from kv_oracle.world import arrays, begins, build_world
from kvtransfer.peer_plan import (
    build_instance_plans,
    build_rank_plans,
    combine_digests,
    expected_need,
    plan_digest,
    rank_digest,
)

if TYPE_CHECKING:
    from kv_oracle.request import Case
    from kv_oracle.world import World
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import Extent


class CaseFailed(AssertionError):
    """The planner and the oracle disagree about a case, or the planner refuses it."""

    def __init__(self, case: Case, problem: Exception) -> None:
        super().__init__(f"{type(problem).__name__}: {problem}\n{describe(case)}")
        self.problem = f"{type(problem).__name__}: {problem}"


def check_case(case: Case, *, seed_compat: bool = False, other_forms: bool = False, digests: bool = False) -> World:
    """Returns the case with everything that was built for it.

    Raises CaseFailed when a byte, a writer, an extent or a digest is not what the loops say. `other_forms`: also the
    strided form and the packing, byte by byte. `digests`: also that both sides agree.
    """
    try:
        world = build_world(case)
        plans = _plan(world, seed_compat)
        _transfer(world, plans, seed_compat, other_forms)
        if digests:
            _compare_digests(world)
        return world
    except Exception as error:
        raise CaseFailed(case, error) from error


def _plan(world: World, seed_compat: bool) -> list[PeerPlan]:
    """The plans of all source ranks to the attention-dp group that takes the request."""
    case, context = world.case, world.src.info.ranks
    if case.src.dp == case.dst.dp == 1:
        return list(build_instance_plans(world.src.info, world.dst.info, seed_compat=seed_compat))
    made = [
        plan
        for rank in world.src.holders
        for plan in build_rank_plans(context[rank], world.dst.info, context, seed_compat=seed_compat)
    ]
    return [plan for plan in made if plan.dst_dp == case.dst.dp_rank]


def _transfer(world: World, plans: list[PeerPlan], seed_compat: bool, other_forms: bool) -> None:
    case, src, dst = world.case, world.src, world.dst
    sources = {rank: source_memory(case, world.codes, src, rank, world.src_lists[rank]) for rank in src.holders}
    targets = {rank: Memory(dst.storages[rank].regions, NOTHING) for rank in dst.holders}
    writers = {rank: np.full(len(memory.codes), -1) for rank, memory in targets.items()}
    first = begins(world)
    need = expected_need(plans, world.window, first, src_dp=case.src.dp_rank, dst_dp=case.dst.dp_rank)
    whole = {pair: tokens_of(world, pair[1], extents) for pair, extents in need.extents.items()}
    reported: dict[tuple[int, int], list[Extent]] = {}
    for chunk in world.chunks():
        for plan in plans:
            source, target = sources[plan.src_rank], targets[plan.dst_rank]
            src_blocks, src_begins = arrays(src, plan.src_rank, world.src_lists[plan.src_rank])
            dst_blocks, dst_begins = arrays(dst, plan.dst_rank, world.dst_lists[plan.dst_rank])
            plan.check_destination(dst_blocks, chunk, dst_begins)
            lists = {"src_begins": src_begins, "dst_begins": dst_begins}
            pairs = plan.instantiate(src_blocks, dst_blocks, chunk, **lists)
            touched, moved = execute(source, target, pairs.src, pairs.dst, pairs.lengths)
            writers[plan.dst_rank][touched] = plan.src_rank
            extents = plan.extents(chunk, dst_begins)
            pair = (plan.src_rank, plan.dst_rank)
            compare_tokens(world, plan, chunk, moved, extents, whole.get(pair, {}))
            reported.setdefault(pair, []).extend(extents)
            if other_forms:
                check_other_forms(world, plan, chunk, pairs)
    for rank, target in targets.items():
        compare_bytes(world, rank, target, writers[rank], seed_compat)
    compare_need(world, need, reported)


def _compare_digests(world: World) -> None:
    """Each context rank on its own, and either side from both descriptions, arrive at the same value."""
    src, dst = world.src.info, world.dst.info
    by_rank = [rank_digest(build_rank_plans(rank, dst, src.ranks)) for rank in src.ranks]
    assert combine_digests(by_rank) == plan_digest(src, dst), "the digests of the two sides differ"
