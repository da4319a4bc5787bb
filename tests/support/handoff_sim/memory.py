"""Memory of the ranks: real words that writes stamp. Made once per place and used again by every schedule, so that the
page tables, and with them the plans, are the same in all of them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)

from .script import PAGES_PER_NODE

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey

RANKS = 4
# K and V of one token and one head, 8 bytes each.
WORDS_PER_PAGE = 2
_NOTHING = 0xEEEEEEEEEEEEEEEE


class Arena:
    """The pool of one rank: word i of page p is words[p * WORDS_PER_PAGE + i]."""

    def __init__(self, rank: int) -> None:
        self.words = (ctypes.c_uint64 * (PAGES_PER_NODE * WORDS_PER_PAGE))()
        self.base = ctypes.addressof(self.words)
        self.table = _page_table(self.base, rank)

    def clear(self) -> None:
        """As nobody's memory looks."""
        self.words[:] = [_NOTHING] * len(self.words)

    def fill(self, pages: list[int], code: int) -> None:
        """What the prefill would have computed."""
        for page in pages:
            for word in range(WORDS_PER_PAGE):
                self.words[page * WORDS_PER_PAGE + word] = code

    def holds(self, page: int, code: int) -> bool:
        """True when the whole page carries the code."""
        at = page * WORDS_PER_PAGE
        return all(word == code for word in self.words[at : at + WORDS_PER_PAGE])


_ARENAS: dict[tuple[str, int, int], Arena] = {}


def arenas(name: str, life: int) -> list[Arena]:
    """Cleared memory of the n-th life of an instance, one per rank."""
    made: list[Arena] = []
    for rank in range(RANKS):
        place = (name, life, rank)
        if place not in _ARENAS:
            _ARENAS[place] = Arena(rank)
        _ARENAS[place].clear()
        made.append(_ARENAS[place])
    return made


def code_of(key: RequestKey, rank: int) -> int:
    """What the source pages of an attempt hold on one rank."""
    return (key.request_id << 16 | key.attempt << 4 | rank) & (1 << 63) - 1


def _page_table(base: int, rank: int) -> PageTable:
    slot = WORDS_PER_PAGE * 8
    pool = PhysicalPool(base, slot, PAGES_PER_NODE, slot, 0)
    views = tuple(
        PoolView(frozenset({name}), MapperKind.NHD, 0, _entry(number * 8), HeadInterval(rank, rank + 1))
        for number, name in enumerate("kv")
    )
    region = RegisteredRegion(base, slot * PAGES_PER_NODE, MemoryKind.DRAM)
    return PageTable((region,), (pool,), (AttentionGroup((0,), 1, views),))


def _entry(offset: int) -> BufferEntries:
    return BufferEntries(np.zeros(1, np.uint32), np.array([offset], np.uint64), np.array([8], np.uint32))
