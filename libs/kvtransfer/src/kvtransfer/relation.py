"""Destination interval -> writer, for two whole instances: what both sides must agree on before any byte moves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.election import elect, instance_seed
from kvtransfer.holdings import holdings_of
from kvtransfer.overlap import Atoms, overlap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.holdings import Holdings
    from kvtransfer.rank_info import RankInfo


@dataclass(frozen=True, slots=True, eq=False)
class Hole:
    """Units [lo, hi) of a destination row that no rank of the source's attention-dp group `dp` can write."""

    dst_row: int
    dp: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True, eq=False)
class Relation:
    """`atoms` are maximal: neighbours with the same writer are one. Sorted by (src rank, dst rank, destination row)."""

    src: Holdings
    dst: Holdings
    atoms: Atoms
    src_rank: NDArray[np.int64]
    dst_rank: NDArray[np.int64]
    holes: tuple[Hole, ...]
    src_groups: int

    def pairs(self) -> list[tuple[int, int]]:
        """(src rank, dst rank) with at least one atom, sorted."""
        new = np.ones(len(self.src_rank), np.bool_)
        new[1:] = (self.src_rank[1:] != self.src_rank[:-1]) | (self.dst_rank[1:] != self.dst_rank[:-1])
        return list(zip(self.src_rank[new].tolist(), self.dst_rank[new].tolist(), strict=True))

    def of(self, src_rank: int, dst_rank: int) -> Atoms:
        """What one rank writes to another."""
        begin, end = _span(self.src_rank, src_rank)
        first, last = _span(self.dst_rank[begin:end], dst_rank)
        return self.atoms.take(np.arange(begin + first, begin + last))


def _span(ascending: NDArray[np.int64], value: int) -> tuple[int, int]:
    return int(np.searchsorted(ascending, value)), int(np.searchsorted(ascending, value, "right"))


def relate(
    context: Sequence[RankInfo], generation: Sequence[RankInfo], instance_id: str, *, seed_compat: bool = False
) -> Relation:
    """The relation of two instances; `instance_id` is the destination's. Page tables have been validated."""
    seed = None if seed_compat else instance_seed(instance_id)
    return _relate(geometry_of(context), geometry_of(generation), seed)


def geometry_of(ranks: Sequence[RankInfo]) -> tuple[RankGeometry, ...]:
    """Keys for caches over whole instances."""
    return tuple(RankGeometry(info) for info in ranks)


class RankGeometry:
    """A rank compared by what planning looks at; its agent is made anew with every start."""

    def __init__(self, info: RankInfo) -> None:
        self.info = info
        self._hash = hash((info.rank, info.topology, info.page_table))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankGeometry):
            return NotImplemented
        a, b = self.info, other.info
        return a.rank == b.rank and a.topology == b.topology and a.page_table == b.page_table


_Ranks = tuple[RankGeometry, ...]


# Negotiation asks for compatibility, plans and digest of the same pair one after the other.
@lru_cache(maxsize=32)
def _join(context: _Ranks, generation: _Ranks) -> tuple[Holdings, Holdings, Atoms]:
    src, dst = (holdings_of([one.info for one in side]) for side in (context, generation))
    return src, dst, overlap(src, dst)


@lru_cache(maxsize=32)
def _relate(context: _Ranks, generation: _Ranks, seed: int | None) -> Relation:
    src, dst, shared = _join(context, generation)
    chosen = elect(src, dst, shared, seed)
    src_rank = src.column("rank")[src.part[chosen.src_row]]
    dst_rank = dst.column("rank")[dst.part[chosen.dst_row]]
    groups = context[0].info.topology.dp_size
    holes = _holes(src, dst, chosen, groups)
    order = np.lexsort((chosen.lo, chosen.src_row, chosen.dst_row, dst_rank, src_rank))
    atoms = chosen.take(order)
    new = np.ones(len(atoms), np.bool_)
    new[1:] = (
        (atoms.src_row[1:] != atoms.src_row[:-1])
        | (atoms.dst_row[1:] != atoms.dst_row[:-1])
        | (atoms.lo[1:] != atoms.hi[:-1])
    )
    first = np.flatnonzero(new)
    last = np.flatnonzero(np.append(new[1:], True)) if len(new) else first
    merged = Atoms(atoms.src_row[first], atoms.dst_row[first], atoms.lo[first], atoms.hi[last])
    ranks = order[first]
    return Relation(src, dst, merged, src_rank[ranks], dst_rank[ranks], holes, groups)


def _holes(src: Holdings, dst: Holdings, chosen: Atoms, groups: int) -> tuple[Hole, ...]:
    """Every unit of every destination row must come from each dp group, once for each of the group's token shards."""
    part = src.part[chosen.src_row]
    shards, dp = src.column("shard_count")[part], src.column("dp")[part]
    have = np.zeros((len(dst.part), groups), np.int64)
    need = np.ones_like(have)
    np.add.at(have, (chosen.dst_row, dp), chosen.hi - chosen.lo)
    np.maximum.at(need, (chosen.dst_row, dp), shards)
    lo, hi = dst.column("lo")[dst.part], dst.column("hi")[dst.part]
    short: list[list[int]] = np.argwhere(have != need * (hi - lo)[:, None]).tolist()
    holes: list[Hole] = []
    for row, group in short:
        # The election returns its atoms by destination row.
        begin, end = _span(chosen.dst_row, row)
        mine = np.flatnonzero(dp[begin:end] == group) + begin
        holes += _missing(row, group, chosen.take(mine), int(lo[row]), int(hi[row]))
    return tuple(holes)


def _missing(row: int, group: int, atoms: Atoms, lo: int, hi: int) -> list[Hole]:
    """What is between the intervals that have a writer; the whole row when only token shards are missing."""
    spans = sorted(zip(atoms.lo.tolist(), atoms.hi.tolist(), strict=True))
    holes: list[Hole] = []
    at = lo
    for begin, end in [*spans, (hi, hi)]:
        if begin > at:
            holes.append(Hole(row, group, at, begin))
        at = max(at, end)
    return holes or [Hole(row, group, lo, hi)]


def forget_all() -> None:
    """Empties the caches: for measurements."""
    _join.cache_clear()
    _relate.cache_clear()
