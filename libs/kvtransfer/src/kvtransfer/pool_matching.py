"""Which of my groups and views meet which of the peer's: by global layer id first, then by equal roles.

mine                                yours
group 0: layers 0-3  ──layer id──▶  group 1: layers 0-3        a hit in two peer groups is refused
  view {"k"} layers 0-3 ──roles──▶    view {"k"} layers 0-3
  view {"v"} layers 0-3 ──roles──▶    view {"v"} layers 0-3
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.ports import Incompatibility

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvtransfer.page_table import AttentionGroup, PageTable, PoolView


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """Group `mine` of my page table and group `yours` of the peer's hold the same layers. `views`: (mine, yours)."""

    mine: int
    yours: int
    views: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """`groups` are complete exactly when `incompatibilities` is empty."""

    groups: tuple[GroupMatch, ...]
    incompatibilities: tuple[Incompatibility, ...]


def match_pools(mine: PageTable, yours: PageTable, where: str = "page_table") -> Matching:
    """Pairs every view of both tables, or says everything that stands in the way. Never raises on valid tables."""
    problems: list[Incompatibility] = []
    groups: list[GroupMatch] = []
    owner = {layer: g for g, group in enumerate(yours.groups) for layer in group.global_layer_ids}
    _compare_layers(mine, yours, where, problems)
    for g, group in enumerate(mine.groups):
        field = f"{where}.groups[{g}]"
        hits: defaultdict[int, list[int]] = defaultdict(list)
        for layer in group.global_layer_ids:
            if layer in owner:
                hits[owner[layer]].append(layer)
        if len(hits) > 1:
            theirs = ", ".join(f"group {h}: layers {_layers(layers)}" for h, layers in sorted(hits.items()))
            remedy = "group the layers alike on both sides"
            problems.append(
                Incompatibility(f"{field}.global_layer_ids", _layers(group.global_layer_ids), theirs, remedy)
            )
        elif hits:
            (peer,) = hits
            other = yours.groups[peer]
            left, right = _layers(group.global_layer_ids), _layers(other.global_layer_ids)
            if left != right:
                _differ(problems, f"{field}.global_layer_ids", left, right, "group the layers alike on both sides")
                continue
            _compare_groups(group, other, field, problems)
            groups.append(GroupMatch(g, peer, _match_views(group, other, field, problems)))
    return Matching(tuple(groups), tuple(problems))


def view_layers(group: AttentionGroup, view: PoolView) -> dict[int, list[int]]:
    """Global layer id -> indices of its buffers in the view, in entry order."""
    buffers: defaultdict[int, list[int]] = defaultdict(list)
    for index, layer in enumerate(view.entries.layer.tolist()):
        buffers[group.global_layer_ids[layer]].append(index)
    return dict(buffers)


def _differ(problems: list[Incompatibility], field: str, mine: object, yours: object, remedy: str) -> None:
    if mine != yours:
        problems.append(Incompatibility(field, str(mine), str(yours), remedy))


def _layers(layers: Iterable[int]) -> str:
    """ "0-3,7" """
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def _compare_layers(mine: PageTable, yours: PageTable, where: str, problems: list[Incompatibility]) -> None:
    left = {layer for group in mine.groups for layer in group.global_layer_ids}
    right = {layer for group in yours.groups for layer in group.global_layer_ids}
    _differ(problems, f"{where}.layers", _layers(left), _layers(right), "serve the same layers on this rank")


def _compare_groups(mine: AttentionGroup, yours: AttentionGroup, field: str, problems: list[Incompatibility]) -> None:
    remedy = "use the same engine.tokens_per_block on both sides"
    _differ(problems, f"{field}.tokens_per_block", mine.tokens_per_block, yours.tokens_per_block, remedy)
    remedy = "serve the same model with the same attention window"
    _differ(problems, f"{field}.sliding_window", mine.sliding_window, yours.sliding_window, remedy)


def _match_views(
    mine: AttentionGroup, yours: AttentionGroup, field: str, problems: list[Incompatibility]
) -> tuple[tuple[int, int], ...]:
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for v, view in enumerate(mine.views):
        layers = view_layers(mine, view)
        found = [
            w
            for w, other in enumerate(yours.views)
            if other.roles == view.roles and not layers.keys().isdisjoint(view_layers(yours, other))
        ]
        if len(found) != 1 or found[0] in taken:
            label = f"{{{', '.join(sorted(view.roles))}}} of layers {_layers(layers)}"
            theirs = ", ".join(f"view {w}" for w in found) or "no view"
            remedy = "keep the same roles in one view each on both sides"
            problems.append(Incompatibility(f"{field}.views[{v}].roles", label, theirs, remedy))
            continue
        taken.add(found[0])
        pairs.append((v, found[0]))
        _compare_views((mine, view), (yours, yours.views[found[0]]), f"{field}.views[{v}]", problems)
    for w in sorted(set(range(len(yours.views))) - taken):
        label = f"{{{', '.join(sorted(yours.views[w].roles))}}} (view {w})"
        remedy = "keep the same roles in one view each on both sides"
        problems.append(Incompatibility(f"{field}.views", "no view", label, remedy))
    return tuple(pairs)


def _compare_views(
    mine: tuple[AttentionGroup, PoolView],
    yours: tuple[AttentionGroup, PoolView],
    field: str,
    problems: list[Incompatibility],
) -> None:
    (_, a), (_, b) = mine, yours
    _differ(
        problems, f"{field}.mapper_kind", a.mapper_kind.name, b.mapper_kind.name, "use the same layout on both sides"
    )
    _differ(problems, f"{field}.kv_heads", _heads(a), _heads(b), "use the same tensor parallelism on both sides")
    left, right = view_layers(*mine), view_layers(*yours)
    if left.keys() != right.keys():
        _differ(problems, f"{field}.entries.layer", _layers(left), _layers(right), "keep the same layers in the view")
        return
    for layer in sorted(left):
        mine_sizes, your_sizes = _sizes(a, left[layer]), _sizes(b, right[layer])
        if mine_sizes != your_sizes:
            remedy = "use the same head size, KV dtype and buffers on both sides"
            _differ(problems, f"{field}.entries.size of layer {layer}", mine_sizes, your_sizes, remedy)
            return


def _heads(view: PoolView) -> str:
    return f"[{view.kv_heads.begin}, {view.kv_heads.end})"


def _sizes(view: PoolView, buffers: list[int]) -> list[int]:
    return [int(size) for size in view.entries.size[buffers]]
