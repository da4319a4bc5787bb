"""Can the bytes of one view be those of another? Kinds, sizes and sections, with both values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.page_table import AttentionGroup, MapperKind
from kvtransfer.ports import Incompatibility

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtransfer.page_table import LayerGroup, PoolView

_CONVERTIBLE = frozenset({MapperKind.HND, MapperKind.NHD})

Owned = tuple["LayerGroup", "PoolView"]


def compare_views(
    mine: Owned, yours: Owned, common: Mapping[int, tuple[list[int], list[int]]], field: str
) -> list[Incompatibility]:
    """Everything that differs and can not be converted. `common`: global layer id -> (my buffers, your buffers)."""
    (_, a), (_, b) = mine, yours
    if a.mapper_kind is not b.mapper_kind and not {a.mapper_kind, b.mapper_kind} <= _CONVERTIBLE:
        remedy = "use the same layout on both sides; only HND and NHD are converted"
        return [Incompatibility(f"{field}.mapper_kind", a.mapper_kind.name, b.mapper_kind.name, remedy)]
    if a.mapper_kind is MapperKind.SECTIONED:
        return _compare_sections(a, b, common, field)
    return _compare_units(mine, yours, common, field)


def _compare_units(
    mine: Owned, yours: Owned, common: Mapping[int, tuple[list[int], list[int]]], field: str
) -> list[Incompatibility]:
    """The n-th buffers of a layer must have equal bits for a token of a head. Once for all layers that differ alike."""
    found: dict[tuple[str, str], list[int]] = {}
    a, b = _units(mine), _units(yours)
    for layer, (left, right) in sorted(common.items()):
        sides = [a[i] for i in left], [b[i] for i in right]
        if sides[0] != sides[1]:
            found.setdefault((_text(mine[0], sides[0]), _text(yours[0], sides[1])), []).append(layer)
    remedy = "use the same head size, KV dtype and buffers on both sides"
    return [
        Incompatibility(f"{field}.entries.size of layers {', '.join(map(str, layers))}", a, b, remedy)
        for (a, b), layers in found.items()
    ]


def _units(owned: Owned) -> list[int]:
    """Bits of a token of a head, or of a state, in every buffer of the view."""
    group, view = owned
    parts = group.tokens_per_block if isinstance(group, AttentionGroup) else 1
    if view.mapper_kind is not MapperKind.REPLICATED:
        parts *= len(view.kv_heads)
    return (view.entries.size.astype(np.int64) * 8 // parts).tolist()


def _text(group: LayerGroup, bits: list[int]) -> str:
    unit = "bits a token and head" if isinstance(group, AttentionGroup) else "bits a state"
    return f"{len(bits)} buffers of {', '.join(map(str, bits))} {unit}"


def _compare_sections(
    a: PoolView, b: PoolView, common: Mapping[int, tuple[list[int], list[int]]], field: str
) -> list[Incompatibility]:
    problems: list[Incompatibility] = []
    remedy = "describe the recurrent state alike on both sides"
    left, right = ({section.label: section.unit_bytes for section in view.sections} for view in (a, b))
    if left.keys() != right.keys():
        problems.append(Incompatibility(f"{field}.sections", ", ".join(left), ", ".join(right), remedy))
    for label in left.keys() & right.keys():
        if left[label] != right[label]:
            name = f"{field}.sections[{label}].unit_bytes"
            problems.append(Incompatibility(name, str(left[label]), str(right[label]), remedy))
    if a.rows != b.rows:
        problems.append(Incompatibility(f"{field}.rows", str(a.rows), str(b.rows), remedy))
    for layer, (mine, yours) in sorted(common.items()):
        if len(mine) != len(yours):
            name = f"{field}.entries of layer {layer}"
            problems.append(Incompatibility(name, f"{len(mine)} buffers", f"{len(yours)} buffers", remedy))
            break
    return problems
