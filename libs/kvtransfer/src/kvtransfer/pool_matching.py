"""Which of a rank's groups and views meet which of a peer's: by global layer id first, then by equal roles.

mine                                yours
group 0: layers 0-3  ──layer id──▶  group 1: layers 2-5        a hit in two peer groups is refused
  view {"k"} layers 0-3 ──roles──▶    view {"k"} layers 2-3    the same roles and at least one common layer
                        ──roles──▶    view {"k"} layers 4-5    no common layer, no match
  view {"v"} layers 0-3 ──roles──▶    view {"v"} layers 2-5

A layer that only one side has is no contradiction between two ranks; `storage_check` looks at whole instances.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.page_table import AttentionGroup
from kvtransfer.ports import Incompatibility
from kvtransfer.view_check import compare_views

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from kvtransfer.page_table import LayerGroup, PageTable, PoolView


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """Group `mine` of my page table and group `yours` of the peer's have layers in common. `views`: (mine, yours)."""

    mine: int
    yours: int
    views: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Matching:
    """`groups` are complete exactly when `incompatibilities` is empty."""

    groups: tuple[GroupMatch, ...]
    incompatibilities: tuple[Incompatibility, ...]


def match_pools(mine: PageTable, yours: PageTable, where: str = "page_table") -> Matching:
    """Pairs every view with those that hold the same of the same layers, or says everything that stands in the way.
    Never raises on valid tables."""
    problems: list[Incompatibility] = []
    groups: list[GroupMatch] = []
    hits = _hits(mine, yours)
    for b, other in enumerate(yours.groups):
        others = {g: shared for (g, a), shared in hits.items() if a == b}
        if len(others) > 1:
            ids = layers_text(other.global_layer_ids)
            problems.append(_ambiguous(f"{where}.groups", _by_group(others), ids))
    for g, group in enumerate(mine.groups):
        field = f"{where}.groups[{g}]"
        others = {b: shared for (a, b), shared in hits.items() if a == g}
        if len(others) > 1:
            ids = layers_text(group.global_layer_ids)
            problems.append(_ambiguous(f"{field}.global_layer_ids", ids, _by_group(others)))
        elif others:
            (peer,) = others
            other = yours.groups[peer]
            _compare_windows(group, other, field, problems)
            groups.append(GroupMatch(g, peer, _match_views(group, other, field, problems)))
    return Matching(tuple(groups), tuple(dict.fromkeys(problems)))


def shape(table: PageTable) -> Hashable:
    """What `match_pools` looks at: tables of equal shape get equal answers."""
    return tuple(
        (
            group.global_layer_ids,
            (group.tokens_per_block, group.sliding_window) if isinstance(group, AttentionGroup) else None,
            tuple(_view_shape(view) for view in group.views),
        )
        for group in table.groups
    )


def _view_shape(view: PoolView) -> Hashable:
    sections = tuple((one.label, one.unit_bytes) for one in view.sections)
    entries = (view.entries.layer.tobytes(), view.entries.size.tobytes())
    return view.roles, view.mapper_kind, len(view.kv_heads), sections, view.rows, entries


def view_layers(group: LayerGroup, view: PoolView) -> dict[int, list[int]]:
    """Global layer id -> indices of its buffers in the view, in entry order."""
    buffers: defaultdict[int, list[int]] = defaultdict(list)
    places: list[int] = view.entries.layer.tolist()
    for index, layer in enumerate(places):
        buffers[group.global_layer_ids[layer]].append(index)
    return dict(buffers)


def layers_text(layers: Iterable[int]) -> str:
    """ "0-3,7" """
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "none"


def roles_text(roles: frozenset[str]) -> str:
    """ "{key, value}" """
    return f"{{{', '.join(sorted(roles))}}}"


def _hits(mine: PageTable, yours: PageTable) -> dict[tuple[int, int], list[int]]:
    """(my group, your group) of the same kind -> layers they have in common."""
    owner = {
        (isinstance(group, AttentionGroup), layer): g
        for g, group in enumerate(yours.groups)
        for layer in group.global_layer_ids
    }
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for g, group in enumerate(mine.groups):
        attention = isinstance(group, AttentionGroup)
        for layer in group.global_layer_ids:
            other = owner.get((attention, layer))
            if other is not None:
                found[g, other].append(layer)
    return dict(found)


def _by_group(hits: Mapping[int, list[int]]) -> str:
    return ", ".join(f"group {group}: layers {layers_text(layers)}" for group, layers in sorted(hits.items()))


def _ambiguous(field: str, mine: str, yours: str) -> Incompatibility:
    return Incompatibility(field, mine, yours, "group the layers alike on both sides")


def _compare_windows(mine: LayerGroup, yours: LayerGroup, field: str, problems: list[Incompatibility]) -> None:
    if not (isinstance(mine, AttentionGroup) and isinstance(yours, AttentionGroup)):
        return
    if mine.sliding_window != yours.sliding_window:
        a, b = (str(one.sliding_window) if one.sliding_window else "full attention" for one in (mine, yours))
        remedy = "serve the same model with the same attention window"
        problems.append(Incompatibility(f"{field}.sliding_window", a, b, remedy))


def _match_views(
    mine: LayerGroup, yours: LayerGroup, field: str, problems: list[Incompatibility]
) -> tuple[tuple[int, int], ...]:
    pairs: list[tuple[int, int]] = []
    their_layers = [view_layers(yours, other) for other in yours.views]
    of_role: defaultdict[tuple[frozenset[str], int], list[int]] = defaultdict(list)
    for w, other in enumerate(yours.views):
        for layer in their_layers[w]:
            of_role[other.roles, layer].append(w)
    for v, view in enumerate(mine.views):
        layers = view_layers(mine, view)
        for w in sorted({w for layer in layers for w in of_role.get((view.roles, layer), ())}):
            pairs.append((v, w))
            common = {layer: (layers[layer], their_layers[w][layer]) for layer in layers if layer in their_layers[w]}
            problems += compare_views((mine, view), (yours, yours.views[w]), common, f"{field}.views[{v}]")
    return tuple(pairs)
