"""A radix tree over life cycles: each kind of layer has a pool of its own, and keeps no more than its tokens can see.

layers that see everything     | 7 | 3 | 9 | 4 | 1 |      blocks of the whole sequence
layers with a window           | - | - | - | 2 | 5 |      - : given back as soon as no later token saw it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import InternalError
from isthmus_worker.cache.base import NO_BLOCK, Copy, Need, Prefix, blocks_for, first_seen
from isthmus_worker.cache.page_pool import PagePool
from isthmus_worker.cache.radix_prefixes import RadixPrefixes
from isthmus_worker.cache.radix_tree import RadixTree

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from isthmus_worker.cache.radix_tree import Node

_Lists = tuple["NDArray[np.int32]", ...]


class RadixCache:
    """Implements `isthmus_worker.cache.base.CacheManager`. `num_blocks` and `windows`: of each block list."""

    def __init__(self, num_blocks: Sequence[int], windows: Sequence[int | None], tokens_per_block: int) -> None:
        self.num_blocks, self.windows = tuple(num_blocks), tuple(windows)
        self.tokens_per_block = tokens_per_block
        self._numbers = range(len(self.windows))
        # Names are found as long as the longest-lived list has their blocks.
        self._leading = self.windows.index(None) if None in self.windows else 0
        self._tree = RadixTree(len(self.windows), self._leading)
        self._pools = [self._pool(number, count) for number, count in enumerate(self.num_blocks)]
        self._known = RadixPrefixes(self._tree, self.windows, tokens_per_block)
        self._tables: dict[Hashable, _Lists] = {}

    def _pool(self, number: int, count: int) -> PagePool:
        return PagePool(count, lambda page: self._lose(number, page))

    @property
    def used(self) -> int:
        """Blocks that somebody holds, of the list that has the fewest left, as if it had max(num_blocks)."""
        return max(self.num_blocks) - self.free_blocks()

    @property
    def cached(self) -> int:
        """Names that can be found."""
        return self._tree.names

    def free_blocks(self) -> int:
        """Blocks that could be taken, of the list that has the fewest left, as if it had max(num_blocks)."""
        most = max(self.num_blocks)
        return min(pool.left * most // pool.num_pages for pool in self._pools)

    def holds(self, holder: Hashable) -> bool:
        """True when it has lists."""
        return holder in self._tables

    def lists(self, holder: Hashable) -> _Lists:
        """Its lists, read-only. Raises InternalError when it has none."""
        tables = self._tables.get(holder)
        if tables is None:
            raise InternalError(f"{holder} holds no blocks")
        return tables

    # --- reuse

    def find(self, names: Sequence[bytes]) -> Prefix:
        """The longest known beginning that can be gone on behind."""
        return self._known.find(names)

    def find_received(self, names: Sequence[bytes], position: int) -> Prefix:
        """What each list has of what a token at `position` sees, up to the first block that is missing."""
        return self._known.find_received(names, position)

    def commit(self, holder: Hashable, names: Sequence[bytes], first: int, whole: Sequence[int]) -> None:
        """Blocks [first, len(names)) can be found from now on; of each list those from `whole` on that are there."""
        tables = self.lists(holder)
        nodes = self._tree.grow(names, first)
        for number, table in zip(self._numbers, tables, strict=True):
            self._commit_list(holder, number, table, nodes, first, whole[number])
        for node in reversed(nodes):
            self._tree.prune(node)

    def _commit_list(
        self,
        holder: Hashable,
        number: int,
        table: NDArray[np.int32],
        nodes: Sequence[Node],
        first: int,
        whole: int,
    ) -> None:
        own: list[int] = table[first : first + len(nodes)].tolist()
        twice: list[int] = []
        for at, (page, node) in enumerate(zip(own, nodes, strict=False), first):
            if page == NO_BLOCK or at < whole or node.pages[number] == page:
                continue
            if node.pages[number] == NO_BLOCK:
                self._tree.attach(node, number, page)
            else:
                twice.append(at)
        if twice:
            instead = np.array([nodes[at - first].pages[number] for at in twice], np.int32)
            replaced = table.copy()
            replaced[twice] = instead
            self._pools[number].hold(instead)
            self._set(holder, number, replaced)
            self._drop(number, table[twice])

    def distrust(self, holder: Hashable) -> None:
        """Nobody finds its blocks any more."""
        for number, table in enumerate(self.lists(holder)):
            for page in table[table != NO_BLOCK].tolist():
                self._lose(number, page)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Names that can be found, and that can not be found any more, since the last call."""
        return self._tree.take_changes()

    def _lose(self, number: int, page: int) -> None:
        """A page loses its name."""
        self._tree.detach(number, page)

    # --- taking

    def can_allocate(self, needs: Sequence[Need], prefix: Prefix | None = None) -> bool:
        """True when there are blocks for new holders, the first of which begins with `prefix`."""
        for number, pool in enumerate(self._pools):
            shared = np.empty(0, np.int32) if prefix is None else prefix.lists[number]
            begins = [len(shared)] + [0] * (len(needs) - 1)
            count = sum(self._count(number, need, begin) for need, begin in zip(needs, begins, strict=True))
            if count > pool.left_beside(shared[shared != NO_BLOCK]):
                return False
        return True

    def allocate(self, holder: Hashable, need: Need, prefix: Prefix | None = None) -> None:
        """The lists of a new holder."""
        if holder in self._tables:
            raise InternalError(f"{holder} holds blocks already")
        if not self.can_allocate([need], prefix):
            raise InternalError(f"{holder} asked for more blocks than are left")
        shared = [np.empty(0, np.int32) for _ in self._numbers] if prefix is None else list(prefix.lists)
        for number, pages in enumerate(shared):
            self._pools[number].hold(pages[pages != NO_BLOCK])
        tables: list[NDArray[np.int32]] = []
        for number, pages in enumerate(shared):
            own = self._pools[number].take(self._count(number, need, len(pages)))
            gap = self._end(number, need) - need.first - len(pages) - len(own)
            tables.append(_read_only(pages, np.full(gap, NO_BLOCK, np.int32), own))
        self._tables[holder] = tuple(tables)

    def can_reach(self, holder: Hashable, begin: int, end: int) -> bool:
        """True when blocks for tokens up to `end` are there or can be taken, after those before `begin` are back."""
        return all(self._missing(number, table, end) <= self._left_after(number, table, begin)
                   for number, table in enumerate(self.lists(holder)))  # fmt: skip

    def reach(self, holder: Hashable, begin: int, end: int) -> None:
        """Gives back what no token from `begin` on sees, and takes what is missing for `end` tokens."""
        if not self.can_reach(holder, begin, end):
            raise InternalError(f"{holder} asked for more blocks than are left")
        for number, table in enumerate(self.lists(holder)):
            gone = self._gone(number, table, begin)
            missing = self._missing(number, table, end)
            if len(gone):
                kept = table.copy()
                kept[: self._first(number, begin)] = NO_BLOCK
                self._set(holder, number, kept)
                self._drop(number, gone)
            if missing:
                self._set(holder, number, self.lists(holder)[number], self._pools[number].take(missing))

    def can_exchange(self, holder: Hashable, keep: Sequence[int]) -> bool:
        """True when all but the first `keep` blocks of each list can be replaced."""
        return all(
            int((table[kept:] != NO_BLOCK).sum()) <= pool.left
            for table, kept, pool in zip(self.lists(holder), keep, self._pools, strict=True)
        )

    def exchange(self, holder: Hashable, keep: Sequence[int]) -> None:
        """Replaces them."""
        if not self.can_exchange(holder, keep):
            raise InternalError(f"{holder} asked for more blocks than are left")
        for number, (table, kept) in enumerate(zip(self.lists(holder), keep, strict=True)):
            here = np.flatnonzero(table[kept:] != NO_BLOCK) + kept
            fresh = table.copy()
            fresh[here] = self._pools[number].take(len(here))
            self._set(holder, number, fresh)
            self._drop(number, table[here])

    def fork(self, parent: Hashable, child: Hashable, tokens: int) -> list[Copy]:
        """The child goes on behind `tokens` tokens of the parent."""
        full, rest = divmod(tokens, self.tokens_per_block)
        copies: list[Copy] = []
        for number, (table, own) in enumerate(zip(self.lists(parent), self.lists(child), strict=True)):
            seen = table[:full].copy()
            seen[: self._first(number, tokens)] = NO_BLOCK
            self._pools[number].hold(seen[seen != NO_BLOCK])
            self._set(child, number, seen, own)
            if rest:
                copies.append(Copy(number, int(table[full]), int(own[0])))
        return copies

    def rename(self, holder: Hashable, to: Hashable) -> None:
        """Everything of a holder belongs to a new one."""
        tables = self.lists(holder)
        if to in self._tables:
            raise InternalError(f"{to} holds blocks already")
        del self._tables[holder]
        self._tables[to] = tables

    def free(self, holder: Hashable) -> None:
        """Gives everything back."""
        tables = self.lists(holder)
        del self._tables[holder]
        for number, table in enumerate(tables):
            self._drop(number, table[table != NO_BLOCK])

    def whole_from(self, position: int) -> tuple[int, ...]:
        """Blocks before the first position that is seen come in part, or not at all."""
        return tuple(
            0 if window is None else blocks_for(max(0, position - window + 1), self.tokens_per_block)
            for window in self.windows
        )

    def check_integrity(self) -> None:
        """Raises InternalError, naming a block and who holds it, unless every block is in exactly one place, and held
        as often as it is counted, and the tree is whole."""
        self._tree.check_integrity()
        for number, pool in enumerate(self._pools):
            pool.check_integrity(
                f"list {number}",
                {holder: tables[number] for holder, tables in self._tables.items()},
                lambda page, number=number: self._tree.named(number, page),
            )

    # --- places

    def _first(self, number: int, position: int) -> int:
        return first_seen(self.windows[number], position, self.tokens_per_block)

    def _end(self, number: int, need: Need) -> int:
        """Where the list of a new holder ends."""
        return blocks_for(need.end if self.windows[number] is None else need.soon, self.tokens_per_block)

    def _count(self, number: int, need: Need, shared: int) -> int:
        """Blocks of its own."""
        first = max(shared, need.first, self._first(number, need.begin))
        return max(0, self._end(number, need) - first)

    def _gone(self, number: int, table: NDArray[np.int32], begin: int) -> NDArray[np.int32]:
        front = table[: self._first(number, begin)]
        return front[front != NO_BLOCK]

    def _missing(self, number: int, table: NDArray[np.int32], end: int) -> int:
        return max(0, blocks_for(end, self.tokens_per_block) - len(table))

    def _left_after(self, number: int, table: NDArray[np.int32], begin: int) -> int:
        pool, gone = self._pools[number], self._gone(number, table, begin)
        return pool.left + int((pool.references[gone] == 1).sum())

    def _drop(self, number: int, pages: NDArray[np.int32]) -> None:
        self._pools[number].drop(pages, lambda page: self._tree.named(number, page))

    def _set(self, holder: Hashable, number: int, *parts: NDArray[np.int32]) -> None:
        tables = list(self._tables[holder])
        tables[number] = _read_only(*parts)
        self._tables[holder] = tuple(tables)


def _read_only(*parts: NDArray[np.int32]) -> NDArray[np.int32]:
    table = np.concatenate(parts)
    table.setflags(write=False)
    return table
