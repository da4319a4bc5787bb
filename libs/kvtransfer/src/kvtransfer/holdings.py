"""What the ranks of an instance hold, as one table: a row per (rank, layer group, view, section, layer).

The rows of two instances are joined on (what, layer), `what` being the kind of group, the role set and the section. All
of pipeline, tensor, context and data parallelism is in the rows; nothing is derived from sizes of the topology.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.arrays import expand
from kvtransfer.page_table import AttentionGroup, MapperKind
from kvtransfer.sharding import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.page_table import LayerGroup, PoolView
    from kvtransfer.rank_info import RankInfo, Topology

# (recurrent?, roles, section label or "")
What = tuple[bool, frozenset[str], str]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One view of one rank, or one section of it. Units are heads or the units of the section; `unit_bytes` and
    `offset` (of the section in its row, bytes) are 0 outside sections."""

    rank: int
    dp: int
    shard: Shard
    group: int
    view: int
    order: int
    what: What
    kind: MapperKind
    pool: int
    lo: int
    hi: int
    unit_bytes: int
    offset: int
    stride: int
    # What a token of this view is, counted per slot: tokens of a block, or rows of a state.
    tokens: int
    row_bytes: int
    # Bytes from one unit to the next, 0 = they follow each other.
    pitch: int


_COLUMNS = (
    "rank", "dp", "group", "view", "order", "pool", "lo", "hi", "unit_bytes", "offset", "stride", "tokens", "row_bytes",
    "pitch",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Holdings:
    """`part[r]` indexes `parts`, `layer[r]` is a global layer id; the row's buffers are `address` and `size`
    [first[r], first[r] + count[r]), addresses in slot 0. int64 arrays."""

    parts: tuple[Part, ...]
    part: NDArray[np.int64]
    layer: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    address: NDArray[np.int64]
    size: NDArray[np.int64]

    @cached_property
    def _columns(self) -> dict[str, NDArray[np.int64]]:
        pick = attrgetter(*_COLUMNS)
        rows = np.array([pick(part) for part in self.parts], np.int64)
        made: dict[str, NDArray[np.int64]] = {name: rows[:, i] for i, name in enumerate(_COLUMNS)}
        made["kind"] = np.array([part.kind.value for part in self.parts], np.int64)
        for name in ("count", "index"):
            made[f"shard_{name}"] = np.array([getattr(part.shard, name) for part in self.parts], np.int64)
        return made

    def column(self, name: str) -> NDArray[np.int64]:
        """An integer field of `Part`, per part; also `kind` (its number), `shard_count` and `shard_index`."""
        return self._columns[name]

    def whole_bytes(self) -> bool:
        """True when one token of one head is made of whole bytes in every buffer."""
        which, entry = expand(self.first, self.first + self.count)
        part = self.part[which]
        units = self.column("tokens")[part] * (self.column("hi") - self.column("lo"))[part]
        # Sections are bytes already; their sizes say nothing about units.
        units[self.column("unit_bytes")[part] > 0] = 1
        return not bool((self.size[entry] % units).any())


def shard_of(group: LayerGroup, topology: Topology) -> Shard:
    """The tokens of the group that the rank holds."""
    if isinstance(group, AttentionGroup) and group.token_sharding is not None and topology.cp_size > 1:
        return Shard(group.token_sharding, topology.cp_size, topology.cp_rank)
    return Shard()


def holdings_of(ranks: Sequence[RankInfo]) -> Holdings:
    """The table of these ranks. Their page tables have been validated."""
    views = [
        (info, g, group, v, view)
        for info in ranks
        for g, group in enumerate(info.page_table.groups)
        for v, view in enumerate(group.views)
    ]
    parts: list[Part] = []
    parts_of: list[int] = []
    for info, g, group, v, view in views:
        made = _parts(info, g, group, v, view)
        parts.extend(made)
        parts_of.append(len(made))
    lengths = np.array([len(view.entries) for *_, view in views], np.int64)
    address, local, size = _entries(views)
    of_view = np.repeat(np.arange(len(views)), lengths)
    # Stable: the n-th buffer of a layer stays the n-th.
    order = np.lexsort((local, of_view))
    address, local, size, of_view = address[order], local[order], size[order], of_view[order]
    new = np.ones(len(order), np.bool_)
    new[1:] = (of_view[1:] != of_view[:-1]) | (local[1:] != local[:-1])
    first = np.flatnonzero(new)
    count = np.diff(first, append=len(order))
    layer = _global_layers(views, of_view[first], local[first])
    # A row for every part of its view.
    repeat = np.array(parts_of, np.int64)
    begin = np.cumsum(repeat) - repeat
    rows = np.repeat(np.arange(len(first)), repeat[of_view[first]])
    within = np.arange(len(rows)) - np.repeat(
        np.cumsum(repeat[of_view[first]]) - repeat[of_view[first]], repeat[of_view[first]]
    )
    part = begin[of_view[first][rows]] + within
    return Holdings(tuple(parts), part, layer[rows], first[rows], count[rows], address, size)


_View = tuple["RankInfo", int, "LayerGroup", int, "PoolView"]


def _entries(views: list[_View]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(address in slot 0, layer position in its group, size) of all buffers of all views, in order."""
    pools = [info.page_table.pools[view.pool] for info, *_, view in views]
    lengths = [len(view.entries) for *_, view in views]
    local = np.concatenate([view.entries.layer for *_, view in views]).astype(np.int64)
    offset = np.concatenate([view.entries.offset for *_, view in views]).astype(np.int64)
    size = np.concatenate([view.entries.size for *_, view in views]).astype(np.int64)
    base = np.repeat(np.array([pool.base_address for pool in pools], np.int64), lengths)
    stride = np.repeat(np.array([pool.layer_stride for pool in pools], np.int64), lengths)
    return base + local * stride + offset, local, size


def _global_layers(views: list[_View], of_view: NDArray[np.int64], local: NDArray[np.int64]) -> NDArray[np.int64]:
    """Global layer ids of (view, position in its group). Each group's list is copied once."""
    starts: list[int] = []
    known: dict[int, int] = {}
    ids: list[int] = []
    for _, _, group, _, _ in views:
        if id(group) not in known:
            known[id(group)] = len(ids)
            ids.extend(group.global_layer_ids)
        starts.append(known[id(group)])
    return np.array(ids, np.int64)[np.array(starts, np.int64)[of_view] + local]


def _parts(info: RankInfo, g: int, group: LayerGroup, v: int, view: PoolView) -> list[Part]:
    recurrent = not isinstance(group, AttentionGroup)
    topology = info.topology
    dp, shard = topology.tp_rank // topology.tp_per_dp, shard_of(group, topology)
    stride = info.page_table.pools[view.pool].slot_stride
    tokens = view.rows if recurrent else group.tokens_per_block

    def part(order: int, label: str, lo: int, hi: int, unit: int, offset: int, row: int) -> Part:
        what = (recurrent, view.roles, label)
        return Part(
            info.rank,
            dp,
            shard,
            g,
            v,
            order,
            what,
            view.mapper_kind,
            view.pool,
            lo,
            hi,
            unit,
            offset,
            stride,
            tokens,
            row,
            view.pitch or 0,
        )

    if view.mapper_kind is not MapperKind.SECTIONED:
        whole = view.mapper_kind is MapperKind.REPLICATED
        lo, hi = (0, 1) if whole else (view.kv_heads.begin, view.kv_heads.end)
        return [part(0, "", lo, hi, 0, 0, 0)]
    parts: list[Part] = []
    offset, row = 0, view.row_bytes
    for order, section in enumerate(view.sections):
        parts.append(part(order, section.label, section.begin, section.end, section.unit_bytes, offset, row))
        offset += section.nbytes
    return parts
