"""Where the bytes of one rank lie: an address for every (group, part, layer, buffer, slot). Plain arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_oracle.deployment import Deployment, GroupStorage, head_interval
from kv_oracle.model import Attention, Part, Section, State

if TYPE_CHECKING:
    from kv_oracle.model import Model

SLACK = 40  # registered bytes before and after the pools, which nobody may touch


@dataclass(frozen=True)
class Coordinate:
    """Place of a rank in its instance."""

    stage: int
    tp: int
    cp: int
    dp: int


@dataclass(frozen=True)
class Buffer:
    """One tensor of one layer in a slot: address of slot s = start + s * stride."""

    start: int
    stride: int
    size: int


@dataclass
class Pool:
    """As a page table describes it. `layer_stride` None = dense."""

    base: int
    slot_bytes: int
    slots: int
    slot_stride: int
    layer_stride: int | None


@dataclass
class View:
    """One part in one pool; entries (position of the layer in the group, offset, size)."""

    part: int
    pool: int
    entries: list[tuple[int, int, int]]


@dataclass
class RankGroup:
    """What a rank keeps of one group of the model. `slots`: block ids lie in [0, slots)."""

    group: int
    layers: tuple[int, ...]
    slots: int
    views: list[View]


@dataclass
class RankStorage:
    """All pools of one rank. `buffers` by (group, part, layer, buffer)."""

    groups: list[RankGroup]
    pools: list[Pool]
    buffers: dict[tuple[int, int, int, int], Buffer]
    regions: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def local_sections(state: State, style: str, tp: int, rank: int) -> list[tuple[Section, int, int]]:
    """(section, first unit, end unit) that a rank holds, in memory order. A balanced share may be empty."""
    cut: list[tuple[Section, int, int]] = []
    for s in state.sections:
        if s.copies_of_all:
            cut.append((s, 0, s.units))
        elif style == "balanced":
            cut.append((s, rank * s.units // tp, (rank + 1) * s.units // tp))
        else:
            cut.append((s, *head_interval(style, s.units, tp, rank)))
    return cut


def buffer_bytes(part: Part | State, storage: GroupStorage, deployment: Deployment, rank: int) -> int:
    """Bytes of one buffer of a part on a tensor-parallel rank."""
    if isinstance(part, State):
        cut = local_sections(part, deployment.heads, deployment.tp, rank)
        return part.rows * sum((end - begin) * section.unit_bytes for section, begin, end in cut)
    if part.heads == 0:
        return storage.tokens_per_block * part.unit
    begin, end = head_interval(deployment.heads, part.heads, deployment.tp, rank)
    return storage.tokens_per_block * (end - begin) * part.unit


def build_storage(
    model: Model, deployment: Deployment, place: Coordinate, slots: tuple[int, ...], base: int
) -> RankStorage:
    """Lays out all groups of a rank from `base` on. `slots` per group of the model."""
    rank = RankStorage([], [], {})
    at = base + SLACK
    if deployment.shared:
        at = _lay_shared(rank, model, deployment, place, slots, at)
        rank.regions = _regions(rank, deployment.cuts, base, at + SLACK)
        return rank
    for g in deployment.group_order:
        layers = deployment.local_layers(model, place.stage, g)
        if layers:
            at = _lay_group(rank, model, deployment, place, g, layers, slots[g], at)
    rank.regions = _regions(rank, deployment.cuts, base, at + SLACK)
    return rank


def _lay_shared(
    rank: RankStorage, model: Model, deployment: Deployment, place: Coordinate, slots: tuple[int, ...], at: int
) -> int:
    """One slot-major pool for all groups, beside each other in a slot or in each other's place."""
    offset, widest = 0, 0
    inside: list[tuple[int, int, int, int, int, int]] = []  # group, part, layer position, buffer, offset, size
    for g in deployment.group_order:
        if not deployment.local_layers(model, place.stage, g):
            continue
        offset = 0 if deployment.shared == "same" else offset
        for i in range(len(deployment.local_layers(model, place.stage, g))):
            for p, part in enumerate(model.groups[g].parts):
                size = buffer_bytes(part, deployment.groups[g], deployment, place.tp)
                for b in range(part.buffers if isinstance(part, Part) else 1):
                    inside.append((g, p, i, b, offset, size))
                    offset += size + deployment.groups[g].gap
        widest = max(widest, offset)
    for g in dict.fromkeys(g for g, *_ in inside):
        layers = deployment.local_layers(model, place.stage, g)
        group = RankGroup(g, layers, slots[g], [])
        rank.groups.append(group)
        for p in range(len(model.groups[g].parts)):
            mine = [(i, b, o, size) for h, q, i, b, o, size in inside if (h, q) == (g, p)]
            for i, b, o, size in mine:
                rank.buffers[g, p, layers[i], b] = Buffer(at + o, widest, size)
            group.views.append(View(p, 0, [(i, o, size) for i, _, o, size in mine]))
    rank.pools.append(Pool(at, widest, max(slots), widest, 0))
    return at + widest * max(slots)


def _lay_group(
    rank: RankStorage,
    model: Model,
    deployment: Deployment,
    place: Coordinate,
    g: int,
    layers: tuple[int, ...],
    slots: int,
    at: int,
) -> int:
    """Appends the pools of one group from address `at` on. Returns the first free address."""
    storage, parts = deployment.groups[g], model.groups[g].parts
    group = RankGroup(g, layers, slots, [])
    rank.groups.append(group)
    every, positions = range(len(parts)), range(len(layers))
    order = [(p, i) for i in positions for p in every]  # one pool: layer by layer, part by part
    if storage.arrangement == "interleaved":
        order.sort()  # part by part, so that each part is one stretch of the slot
    chunks = {
        "slot_major": [order],
        "interleaved": [order],
        "part_pools": [[(p, i) for i in positions] for p in every],
        "layer_pools": [[(p, i)] for p in every for i in positions],
        "layer_major": [[(p, 0)] for p in every],
    }[storage.arrangement]
    for chunk in chunks:
        offset, inside = 0, list[tuple[int, int, int, int, int]]()  # part, layer position, buffer, offset, size
        for p, i in chunk:
            part = parts[p]
            size = buffer_bytes(part, storage, deployment, place.tp)
            for b in range(part.buffers if isinstance(part, Part) else 1):
                inside.append((p, i, b, offset, size))
                offset += size + storage.gap
        stride, dense = offset, storage.arrangement == "layer_major"
        if dense:
            inside = [(p, i, b, o, size) for p, _, b, o, size in inside for i in positions]
        for p, i, b, o, size in inside:
            start = at + o + (i * slots * stride if dense else 0)
            rank.buffers[g, p, layers[i], b] = Buffer(start, stride, size)
        _emit_pools(rank, group, storage, inside, at, stride)
        at += stride * slots * (len(layers) if dense else 1) + storage.gap
    return at


def _emit_pools(
    rank: RankStorage,
    group: RankGroup,
    storage: GroupStorage,
    inside: list[tuple[int, int, int, int, int]],
    at: int,
    stride: int,
) -> None:
    """Describes a chunk as pools and views: one pool, or one per part where the parts interleave."""
    parts = sorted({p for p, *_ in inside})
    apart = storage.arrangement == "interleaved"
    if not apart:
        rank.pools.append(
            Pool(at, stride - storage.gap, group.slots, stride, None if storage.arrangement == "layer_major" else 0)
        )
    for p in parts:
        mine = [(i, b, o, size) for q, i, b, o, size in inside if q == p]
        first = min(o for _, _, o, _ in mine) if apart else 0
        if apart:
            used = max(o + size for _, _, o, size in mine) - first
            rank.pools.append(Pool(at + first, used, group.slots, stride, 0))
        entries = [(i, o - first, size) for i, _, o, size in sorted(mine)]
        group.views.append(View(p, len(rank.pools) - 1, entries))


def _regions(rank: RankStorage, cuts: str, begin: int, end: int) -> list[tuple[int, int]]:
    if cuts == "one":
        borders = [begin, end]
    elif cuts == "pool":
        borders = [begin, *(pool.base for pool in rank.pools[1:]), end]
    elif _in_each_others_place(rank):
        pool = rank.pools[0]  # only between slots: what is between buffers of one group is inside those of another
        borders = [begin, *(pool.base + s * pool.slot_stride for s in range(1, pool.slots, 2)), end]
    else:
        starts = sorted({b.start + s * b.stride for (g, *_), b in rank.buffers.items() for s in range(_slots(rank, g))})
        borders = [begin, *starts[2::3], end]
    return [(a, b - a) for a, b in itertools.pairwise(borders)]


def _in_each_others_place(rank: RankStorage) -> bool:
    """Groups overlap in memory: some buffers of different groups begin at the same address."""
    return len({buffer.start for buffer in rank.buffers.values()}) < len(rank.buffers)


def _slots(rank: RankStorage, group: int) -> int:
    return next(one.slots for one in rank.groups if one.group == group)


def address(
    rank: RankStorage, model: Model, deployment: Deployment, where: tuple[int, int, int, int], place: tuple[int, ...]
) -> int:
    """Address of an attention atom. `where`: (group, part, layer, buffer); `place`: (slot, token in the block, head
    counted from the rank's first head, heads of the rank)."""
    g, p, _, _ = where
    slot, token, head, heads = place
    group, storage = model.groups[g], deployment.groups[g]
    assert isinstance(group, Attention)
    unit = group.parts[p].unit
    buffer = rank.buffers[where]
    if group.parts[p].heads == 0:
        inner = token * unit
    elif storage.layouts[p] == "hnd":
        inner = (head * storage.tokens_per_block + token) * unit
    else:
        inner = (token * heads + head) * unit
    return buffer.start + slot * buffer.stride + inner
