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

from .bounced import ARENA_WORDS
from .script import PAGES_PER_NODE
from .shapes import HEADS, RANKS

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey

    from .shapes import Shape

_NOTHING = 0xEEEEEEEEEEEEEEEE


class Arena:
    """The pool of one rank. A page has `size` words, one for each (layer, K or V, head) that the rank has; `parts`:
    which part of the model each one belongs to."""

    def __init__(self, shape: Shape, rank: int) -> None:
        layers, heads = shape.layers(rank), shape.heads(rank)
        self.parts = [layer * HEADS + head for layer in layers for _ in "kv" for head in heads]
        self.size = len(self.parts)
        self.pages_words = PAGES_PER_NODE * self.size
        # The arenas for chunks come behind the pages.
        self.words = (ctypes.c_uint64 * (self.pages_words + 2 * ARENA_WORDS))()
        self.base = ctypes.addressof(self.words)
        self.table = _page_table(self.base, layers, heads)

    def clear(self) -> None:
        """As nobody's memory looks."""
        self.words[:] = [_NOTHING] * len(self.words)

    def fill(self, pages: list[int], key: RequestKey) -> None:
        """What the prefill would have computed."""
        codes = [code_of(key, part) for part in self.parts]
        for page in pages:
            self.words[page * self.size : page * self.size + self.size] = codes

    def holds(self, page: int, key: RequestKey) -> bool:
        """True when the whole page carries what the prefill of the key has computed."""
        codes = [code_of(key, part) for part in self.parts]
        return self.words[page * self.size : page * self.size + self.size] == codes


_ARENAS: dict[tuple[Shape, str, int, int], Arena] = {}


def arenas(shape: Shape, name: str, life: int) -> list[Arena]:
    """Cleared memory of the n-th life of an instance, one per rank."""
    made: list[Arena] = []
    for rank in range(RANKS):
        place = (shape, name, life, rank)
        if place not in _ARENAS:
            _ARENAS[place] = Arena(shape, rank)
        _ARENAS[place].clear()
        made.append(_ARENAS[place])
    return made


def code_of(key: RequestKey, part: int) -> int:
    """What the source pages of an attempt hold for one (layer, head)."""
    return (key.request_id << 16 | key.attempt << 4 | part) & (1 << 63) - 1


def _page_table(base: int, layers: tuple[int, ...], heads: tuple[int, ...]) -> PageTable:
    run = len(heads) * 8
    slot = len(layers) * 2 * run
    pool = PhysicalPool(base, slot, PAGES_PER_NODE, slot, 0)
    interval = HeadInterval(heads[0], heads[-1] + 1)
    views = tuple(
        PoolView(frozenset({name}), MapperKind.NHD, 0, _entries(len(layers), number * run, run), interval)
        for number, name in enumerate("kv")
    )
    region = RegisteredRegion(base, slot * PAGES_PER_NODE, MemoryKind.DRAM)
    return PageTable((region,), (pool,), (AttentionGroup(layers, 1, views),))


def _entries(layers: int, first: int, run: int) -> BufferEntries:
    """K or V of each layer, one run of all heads."""
    offsets = first + np.arange(layers, dtype=np.uint64) * np.uint64(2 * run)
    return BufferEntries(np.arange(layers, dtype=np.uint32), offsets.astype(np.uint64), np.full(layers, run, np.uint32))
