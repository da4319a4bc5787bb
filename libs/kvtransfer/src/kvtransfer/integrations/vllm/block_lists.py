"""Block ids of vLLM's groups as the lists of the ranks' layer groups. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvtransfer.ports import RankBlocks

# vLLM's block that stands for tokens nobody needs any more.
_NULL_BLOCK = 0

Blocks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Layer group `group` of rank `rank` uses the block ids of vLLM's group `source`; `ratio` of its blocks of `tokens`
    tokens make one of vLLM's; 0 tokens: a state. `windowed`: of its blocks only the last ones may be there."""

    rank: int
    group: int
    source: int
    ratio: int
    tokens: int
    windowed: bool = False


def rank_groups(facts: Mapping[int, Sequence[tuple[int, int, int, bool]]]) -> tuple[RankGroup, ...]:
    """From what every rank says about its layer groups: (source, ratio, tokens of a block or 0, windowed) each."""
    return tuple(RankGroup(rank, number, *one) for rank in sorted(facts) for number, one in enumerate(facts[rank]))


class BlockLists:
    """Every layer group of every rank."""

    def __init__(self, groups: Sequence[RankGroup] = ()) -> None:
        self._groups = tuple(groups)

    @property
    def stateful(self) -> bool:
        """True when there is a state, which can not be taken one token back."""
        return any(one.tokens == 0 for one in self._groups)

    @property
    def chunk_tokens(self) -> int:
        """Of a prompt that is still computed multiples of so many tokens can be handed off; 0 when it has to be
        complete: windows move on, a state changes."""
        if not self._groups or any(one.tokens == 0 or one.windowed for one in self._groups):
            return 0
        return math.lcm(*(one.tokens * one.ratio for one in self._groups))

    def of_range(self, blocks: Sequence[Sequence[int]], begin: int, end: int) -> tuple[RankBlocks, ...]:
        """Blocks of tokens [begin, end), in each rank's own blocks. `blocks`: by vLLM's groups, from token 0."""
        return tuple(_list(group, blocks, begin, end) for group in self._groups)

    def none(self, tokens: int) -> tuple[RankBlocks, ...]:
        """A receive of nothing, behind a prompt of `tokens` tokens."""
        empty = np.empty(0, np.int32)
        return tuple(RankBlocks(one.rank, one.group, empty, tokens) for one in self._groups)

    def whole(self, blocks: Sequence[Sequence[int]], begin: int, end: int) -> Blocks:
        """vLLM's own blocks of tokens [begin, end) that are there, by its groups."""
        return tuple(self._whole(group, ids, begin, end) for group, ids in enumerate(blocks))

    def _whole(self, group: int, ids: Sequence[int], begin: int, end: int) -> tuple[int, ...]:
        size = next((one.tokens * one.ratio for one in self._groups if one.source == group), 0)
        if not size:
            return ()
        return tuple(one for one in ids[begin // size : -(-end // size)] if one != _NULL_BLOCK)


def _list(group: RankGroup, blocks: Sequence[Sequence[int]], begin: int, end: int) -> RankBlocks:
    ids = np.asarray(blocks[group.source], np.int32)
    if group.tokens == 0:
        return RankBlocks(group.rank, group.group, ids[:1], begin)
    if group.ratio > 1:
        ids = (ids[:, None] * np.int32(group.ratio) + np.arange(group.ratio, dtype=np.int32)).reshape(-1)
    ids = ids[begin // group.tokens : -(-end // group.tokens)]
    if group.windowed:
        ids = np.where(ids // group.ratio == _NULL_BLOCK, np.int32(-1), ids)
    return RankBlocks(group.rank, group.group, ids, begin)
