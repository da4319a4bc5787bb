"""Who holds which KV block. Pure, owned by the executor thread.

Every block is in exactly one of three places: on the free stack, idle in the prefix cache (complete, named, held by
nobody), or held, by as many holders as its count of references says. Blocks that are allocated together come in rising
order where possible, so that a hand-off can merge neighbours into one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import InternalError
from isthmus_worker.cache.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

_NONE: NDArray[np.int32] = np.empty(0, np.int32)


class BlockManager:
    """`num_blocks` blocks of `tokens_per_block` tokens, block ids in [0, num_blocks).

    A table lists the blocks of a holder in token order, int32. Tables are read-only and never changed in place: every
    change makes a new array.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        # A stack: free ids are _stack[:_free], the top is taken first.
        self._stack: NDArray[np.int32] = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._free = num_blocks
        self._references: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._tables: dict[Hashable, NDArray[np.int32]] = {}
        self._cache = PrefixCache()

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._free - self._cache.idle

    @property
    def cached(self) -> int:
        """Blocks that `find` can find, held or not."""
        return len(self._cache)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_block)

    def held(self, holder: Hashable) -> int:
        """Blocks of a holder; 0 when it holds none."""
        table = self._tables.get(holder)
        return 0 if table is None else len(table)

    def table(self, holder: Hashable) -> NDArray[np.int32]:
        """Blocks of a holder. Raises InternalError when it holds none."""
        table = self._tables.get(holder)
        if table is None:
            raise InternalError(f"{holder} holds no blocks")
        return table

    # --- taking

    def can_allocate(self, count: int, shared: NDArray[np.int32] = _NONE) -> bool:
        """True when `count` blocks can be taken beside `shared`, which may be idle and would be evicted otherwise."""
        idle = self._cache.idle
        if idle and len(shared):
            idle -= sum(map(self._cache.is_idle, shared.tolist()))
        return count <= self._free + idle

    def allocate(self, holder: Hashable, count: int, shared: NDArray[np.int32] = _NONE) -> None:
        """First blocks of a new holder: `shared` ones, which keep their content, then `count` of its own.

        Raises InternalError when it holds some, or when too few can be taken.
        """
        if holder in self._tables:
            raise InternalError(f"{holder} holds blocks already")
        if not self.can_allocate(count, shared):
            raise InternalError(f"{holder} asked for {count} blocks, {self._free} are free and {self._cache.idle} idle")
        self._hold(shared)
        self._set(holder, shared, self._take(count))

    def grow(self, holder: Hashable, count: int) -> None:
        """`count` more blocks behind those of a holder. Raises InternalError as `allocate` and `table`."""
        table = self.table(holder)
        if not self.can_allocate(count):
            raise InternalError(f"{holder} asked for {count} blocks, {self._free} are free and {self._cache.idle} idle")
        self._set(holder, table, self._take(count))

    def put_before(self, holder: Hashable, shared: NDArray[np.int32]) -> None:
        """Held blocks of another holder, shared from now on, before those of a holder. Raises InternalError as
        `table`."""
        table = self.table(holder)
        self._hold(shared)
        self._set(holder, shared, table)

    def exchange(self, holder: Hashable, keep: int = 0) -> None:
        """Other blocks in place of all but the first `keep` of a holder, which nobody shares. Raises InternalError as
        `grow`."""
        table = self.table(holder)
        old = table[keep:]
        if not self.can_allocate(len(old)):
            raise InternalError(f"{holder} asked for {len(old)} blocks, {self._free} are free, {self._cache.idle} idle")
        self._set(holder, table[:keep], self._take(len(old)))
        self._drop(old)

    def rename(self, holder: Hashable, to: Hashable) -> None:
        """Everything of a holder belongs to a new one. Raises InternalError as `table`, and when that one has some."""
        table = self.table(holder)
        if to in self._tables:
            raise InternalError(f"{to} holds blocks already")
        del self._tables[holder]
        self._tables[to] = table

    def free(self, holder: Hashable) -> None:
        """Gives everything of a holder back, once. Raises InternalError when it holds nothing."""
        table = self.table(holder)
        del self._tables[holder]
        self._drop(table)

    # --- reuse

    def find(self, names: Sequence[bytes]) -> NDArray[np.int32]:
        """Blocks that hold the longest known beginning of a chain of names; hold them before anything is taken."""
        return np.array(self._cache.find(names), np.int32)

    def commit(self, holder: Hashable, begin: int, names: Sequence[bytes]) -> None:
        """Blocks [begin, begin + len(names)) of a holder are complete and will not be written again.

        Where a name has a block already the holder goes on with that one, and its own is free.
        """
        table = self.table(holder)
        own = table[begin : begin + len(names)].tolist()
        known = [self._cache.add(block, name) for block, name in zip(own, names, strict=True)]
        if known == own:
            return
        twice = np.array([at for at, (a, b) in enumerate(zip(own, known, strict=True)) if a != b], np.int64)
        instead = np.array(known, np.int32)[twice]
        replaced = table.copy()
        replaced[begin + twice] = instead
        self._hold(instead)
        self._set(holder, replaced)
        self._drop(table[begin + twice])

    def distrust(self, holder: Hashable) -> None:
        """The content of a holder's blocks may be wrong: nobody finds them any more."""
        for block in self.table(holder).tolist():
            self._cache.remove(block)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Names that can be found, and that can not be found any more, since the last call."""
        return self._cache.take_changes()

    # --- proof

    def check_integrity(self) -> None:
        """Raises InternalError unless every block is free, idle or held, and held as often as it is counted."""
        self._cache.check_integrity()
        counted = np.bincount(np.concatenate((_NONE, *self._tables.values())), minlength=self.num_blocks)
        self._prove(counted == self._references, "held {} times, counted otherwise", counted)
        nobodys = np.concatenate((self._stack[: self._free], np.array(self._cache.idle_blocks(), np.int32)))
        places = np.bincount(nobodys, minlength=self.num_blocks) + (counted > 0)
        self._prove(places == 1, "in {} places (free, idle, held)", places)
        if any(map(self._cache.has, self._stack[: self._free].tolist())):
            raise InternalError("the block ledger is broken: a free block has a name")

    def _prove(self, right: NDArray[np.bool_], words: str, values: NDArray[np.int64]) -> None:
        wrong = np.flatnonzero(~right)
        if len(wrong):
            block = int(wrong[0])
            holders = [str(holder) for holder, table in self._tables.items() if block in table]
            raise InternalError(
                f"the block ledger is broken: block {block} is {words.format(int(values[block]))}; held by "
                f"{', '.join(holders) or 'nobody'}; {len(wrong)} of {self.num_blocks} blocks are wrong"
            )

    # --- places

    def _set(self, holder: Hashable, *parts: NDArray[np.int32]) -> None:
        table = np.concatenate(parts)
        table.setflags(write=False)
        self._tables[holder] = table

    def _take(self, count: int) -> NDArray[np.int32]:
        """New blocks, held once."""
        if count > self._free:
            self._push(np.array(self._cache.evict(count - self._free), np.int32))
        taken = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._references[taken] = 1
        return taken

    def _hold(self, blocks: NDArray[np.int32]) -> None:
        """One more holder of each; they have a place already."""
        idle = blocks[self._references[blocks] == 0]
        self._cache.wake(idle.tolist())
        self._references[blocks] += 1

    def _drop(self, blocks: NDArray[np.int32]) -> None:
        """One holder less of each."""
        self._references[blocks] -= 1
        unheld = blocks[self._references[blocks] == 0]
        named = np.fromiter(map(self._cache.has, unheld.tolist()), np.bool_, len(unheld))
        self._cache.rest(unheld[named].tolist())
        self._push(unheld[~named])

    def _push(self, blocks: NDArray[np.int32]) -> None:
        self._stack[self._free : self._free + len(blocks)] = blocks[::-1]
        self._free += len(blocks)
