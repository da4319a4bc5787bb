"""Can everything that one instance holds be written by another? All reasons against it in one go."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.group_plan import group_plans
from kvtransfer.overlap import same_units
from kvtransfer.page_table import AttentionGroup
from kvtransfer.pool_matching import layers_text, match_pools, roles_text, shape
from kvtransfer.ports import Incompatibility
from kvtransfer.relation import geometry_of, relate
from kvtransfer.run_table import UnalignedSlice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtransfer.holdings import Holdings, Part, What
    from kvtransfer.rank_info import RankInfo
    from kvtransfer.relation import RankGeometry, Relation


def check_instances(context: Sequence[RankInfo], generation: Sequence[RankInfo]) -> tuple[Incompatibility, ...]:
    """Empty: every byte of the generation's cache has a writer. `mine` is the context side."""
    return _check(geometry_of(context), geometry_of(generation))


# Negotiation asks for compatibility, plans and digest of the same pair one after the other.
@lru_cache(maxsize=32)
def _check(context: tuple[RankGeometry, ...], generation: tuple[RankGeometry, ...]) -> tuple[Incompatibility, ...]:
    src, dst = [one.info for one in context], [one.info for one in generation]
    problems = _uniform(src, mine=True) + _uniform(dst, mine=False)
    # The ranks of an instance mostly differ in addresses and heads only: one of each shape speaks for all.
    left, right = ({shape(info.page_table): info for info in side[::-1]}.values() for side in (src, dst))
    problems += _unique(
        problem
        for a in left
        for b in right
        for problem in match_pools(a.page_table, b.page_table, f"ranks[{a.rank}].page_table").incompatibilities
    )
    relation = relate(src, dst, "", seed_compat=True)
    # Views that can not be mapped say so above; what nobody holds is another matter.
    if not same_units(relation.src, relation.dst):
        problems += _coverage(relation)
    problems += _holes(relation, dst)
    return tuple(problems or _unaligned(relation, src, dst))


def _unique(problems: Iterable[Incompatibility]) -> list[Incompatibility]:
    """The same complaint about many pairs of ranks is said once."""
    seen: dict[tuple[str, str, str], Incompatibility] = {}
    for problem in problems:
        _, _, rest = problem.field.partition(".")
        seen.setdefault((rest, problem.mine, problem.yours), problem)
    return list(seen.values())


def _uniform(ranks: Sequence[RankInfo], *, mine: bool) -> list[Incompatibility]:
    """Token sharding and window of a layer must be the same on every rank of an instance."""
    problems: list[Incompatibility] = []
    first: dict[tuple[str, int], tuple[int, str]] = {}
    seen: set[tuple[object, ...]] = set()
    for info in ranks:
        for g, group in enumerate(info.page_table.groups):
            if not isinstance(group, AttentionGroup):
                continue
            sharding = group.token_sharding
            alike = (group.global_layer_ids, sharding, group.sliding_window)
            if alike in seen:
                continue
            seen.add(alike)
            shown = "none" if sharding is None else f"{sharding.kind.name} by {sharding.granularity}"
            for name, value in (("token_sharding", shown), ("sliding_window", str(group.sliding_window))):
                known = {first.setdefault((name, layer), (info.rank, value)) for layer in group.global_layer_ids}
                for rank, other in sorted(one for one in known if one[1] != value):
                    field = f"ranks[{info.rank}].page_table.groups[{g}].{name}"
                    there = f"{other} on rank {rank} of the same instance"
                    a, b = (value, there) if mine else (there, value)
                    remedy = "describe the same layers alike on all ranks of an instance"
                    problems.append(Incompatibility(field, a, b, remedy))
    return problems


def _coverage(relation: Relation) -> list[Incompatibility]:
    """Both instances must keep the same of the same layers, and the source nothing that the destination has not."""
    sides = [_held(holdings) for holdings in (relation.src, relation.dst)]
    every = [{layer for layers in side.values() for layer in layers} for side in sides]
    problems: list[Incompatibility] = []
    if every[0] != every[1]:
        mine, yours = map(layers_text, every)
        problems.append(Incompatibility("page_table.layers", mine, yours, "serve the same layers on both sides"))
    common = every[0] & every[1]
    for what in dict.fromkeys((*sides[0], *sides[1])):
        left, right = (side.get(what, {}) for side in sides)
        if left.keys() & common != right.keys() & common:
            mine, yours = (f"layers {layers_text(side)}" for side in (left, right))
            remedy = "keep the same roles of the same layers on both sides"
            problems.append(Incompatibility(f"page_table.roles {_what_text(what)}", mine, yours, remedy))
        problems += _surplus(what, left, right)
    return problems


def _held(holdings: Holdings) -> dict[What, dict[int, set[tuple[int, int]]]]:
    """What -> layer -> intervals of heads or units that some rank holds."""
    found: dict[What, dict[int, set[tuple[int, int]]]] = {}
    for part, layer in _rows(holdings):
        found.setdefault(part.what, {}).setdefault(layer, set()).add((part.lo, part.hi))
    return found


def _rows(holdings: Holdings) -> list[tuple[Part, int]]:
    numbers: list[tuple[int, int]] = np.stack((holdings.part, holdings.layer), axis=1).tolist()
    return [(holdings.parts[index], layer) for index, layer in numbers]


def _surplus(
    what: What, left: dict[int, set[tuple[int, int]]], right: dict[int, set[tuple[int, int]]]
) -> list[Incompatibility]:
    """Heads of the source that no rank of the destination holds: another model, or a hole between its ranks."""
    found: dict[tuple[str, str], list[int]] = {}
    for layer in left.keys() & right.keys():
        if left[layer] != right[layer]:
            mine, yours = _union(left[layer]), _union(right[layer])
            if any(not any(a <= lo and hi <= b for a, b in yours) for lo, hi in mine):
                sides = [", ".join(f"[{lo}, {hi})" for lo, hi in one) for one in (mine, yours)]
                found.setdefault((sides[0], sides[1]), []).append(layer)
    name = f"page_table.{'sections' if what[2] else 'kv_heads'} {_what_text(what)}"
    remedy = "serve the same model, and let the ranks of each side hold every head between them"
    return [Incompatibility(f"{name} of layers {layers_text(ids)}", *pair, remedy) for pair, ids in found.items()]


def _union(intervals: set[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for lo, hi in sorted(intervals):
        if joined and lo <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(hi, joined[-1][1]))
        elif lo < hi:
            joined.append((lo, hi))
    return joined


def _what_text(what: What) -> str:
    recurrent, roles, label = what
    kind = "recurrent " if recurrent else ""
    return f"{kind}{roles_text(roles)}" + (f" section {label}" if label else "")


def _holes(relation: Relation, generation: Sequence[RankInfo]) -> list[Incompatibility]:
    if not relation.holes:
        return []
    dst, groups = relation.dst, defaultdict[tuple[int, int, int, int], list[int]](list)
    held = {(part.what, layer) for part, layer in _rows(relation.src)}
    for hole in relation.holes:
        part, layer = dst.parts[int(dst.part[hole.dst_row])], int(dst.layer[hole.dst_row])
        if (part.what, layer) not in held:
            continue  # nobody holds any of it: `_coverage` says so
        groups[int(dst.part[hole.dst_row]), hole.dp, hole.lo, hole.hi].append(int(dst.layer[hole.dst_row]))
    problems: list[Incompatibility] = []
    for (index, dp, lo, hi), layers in groups.items():
        part = dst.parts[index]
        name = f"sections[{part.what[2]}]" if part.what[2] else "kv_heads"
        field = f"ranks[{part.rank}].page_table.groups[{part.group}].views[{part.view}].{name}"
        where = f"of layers {layers_text(layers)}"
        group = f" of attention-dp group {dp}" if relation.src_groups > 1 else ""
        mine = f"no rank{group} holds [{lo}, {hi}) {where}, or not with all token shards"
        remedy = "let the ranks of the context side hold every head between them"
        problems.append(Incompatibility(field, mine, f"[{part.lo}, {part.hi})", remedy))
    return problems


def _unaligned(relation: Relation, src: Sequence[RankInfo], dst: Sequence[RankInfo]) -> list[Incompatibility]:
    """Elements smaller than a byte: a cut between heads or tokens may fall inside one."""
    problems: list[Incompatibility] = []
    if relation.src.whole_bytes():
        return problems
    left, right = ({info.rank: info for info in side} for side in (src, dst))
    for a, b in relation.pairs():
        for plan in group_plans(relation, left[a], right[b]):
            if not plan.odd_sizes:
                continue
            try:
                plan.prepare()
            except UnalignedSlice as error:
                field = f"ranks[{a}].page_table.groups[{plan.src.number}].head slice"
                remedy = "use a tensor parallelism and block sizes that cut at whole bytes"
                problems.append(Incompatibility(field, error.mine, error.yours, remedy))
    return _unique(problems)


def forget_all() -> None:
    """Empties the cache: for measurements."""
    _check.cache_clear()
