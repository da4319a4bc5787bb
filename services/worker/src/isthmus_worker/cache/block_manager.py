"""Who holds which KV block. Every block is free or belongs to exactly one holder; pure, owned by the executor thread.

Blocks of one allocation come in rising order where possible, so that a hand-off can merge neighbours into one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from numpy.typing import NDArray


class BlockManager:
    """`num_blocks` blocks of `tokens_per_block` tokens, block ids in [0, num_blocks)."""

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        # A stack: free ids are _stack[:_free], the top is taken first.
        self._stack: NDArray[np.int32] = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._free = num_blocks
        self._tables: dict[Hashable, NDArray[np.int32]] = {}

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.tokens_per_block)

    def held(self, holder: Hashable) -> int:
        """Blocks of a holder; 0 when it holds none."""
        table = self._tables.get(holder)
        return 0 if table is None else len(table)

    def table(self, holder: Hashable) -> NDArray[np.int32]:
        """Blocks of a holder in token order, int32. Read-only and never changed in place: growth makes a new array."""
        table = self._tables.get(holder)
        if table is None:
            raise InternalError(f"{holder} holds no blocks")
        return table

    def can_allocate(self, count: int) -> bool:
        """True when `count` blocks are free."""
        return count <= self._free

    def allocate(self, holder: Hashable, count: int) -> None:
        """First blocks of a new holder. Raises InternalError when it has some, or when too few are free."""
        if holder in self._tables:
            raise InternalError(f"{holder} holds blocks already")
        self._tables[holder] = self._take(holder, count)

    def grow(self, holder: Hashable, count: int) -> None:
        """`count` more blocks behind those of a holder. Raises InternalError as `allocate` and `table`."""
        table = np.concatenate((self.table(holder), self._take(holder, count)))
        table.setflags(write=False)
        self._tables[holder] = table

    def free(self, holder: Hashable) -> None:
        """Gives everything of a holder back, once. Raises InternalError when it holds nothing."""
        table = self.table(holder)
        del self._tables[holder]
        self._stack[self._free : self._free + len(table)] = table[::-1]
        self._free += len(table)

    def check_integrity(self) -> None:
        """Raises InternalError unless free and held blocks together are every block exactly once."""
        owned = np.concatenate((self._stack[: self._free], *self._tables.values()))
        times = np.bincount(owned, minlength=self.num_blocks)
        wrong = np.flatnonzero(times != 1)
        if len(wrong):
            block = int(wrong[0])
            raise InternalError(
                f"the block ledger is broken: block {block} is owned {int(times[block])} times, "
                f"{len(wrong)} of {self.num_blocks} blocks are wrong"
            )

    def _take(self, holder: Hashable, count: int) -> NDArray[np.int32]:
        if not self.can_allocate(count):
            raise InternalError(f"{holder} asked for {count} blocks, {self._free} are free")
        taken = self._stack[self._free - count : self._free][::-1].copy()
        taken.setflags(write=False)
        self._free -= count
        return taken
