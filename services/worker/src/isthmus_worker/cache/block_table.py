"""The block table: one list of blocks for all layers, and blocks of finished prompts found by the hash of their tokens.

sequence A  | 7 | 3 | 9 |            block 7 holds tokens [0, T) of every layer, and so on
sequence B  | 7 | 3 | 4 |            7 and 3 are shared: they have a name each, and A and B begin alike
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isthmus_worker.cache.base import Copy, Need, Prefix, blocks_for

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from isthmus_worker.cache.block_manager import BlockManager

_NONE: NDArray[np.int32] = np.empty(0, np.int32)
# More than any sequence has.
_NEVER = 1 << 30


class BlockTable:
    """Implements `isthmus_worker.cache.base.CacheManager`. `window`: the smallest one of any layer. A hand-off brings
    layers with a window no more than it: a block that is complete for some layers only is not reused."""

    windows: tuple[int | None, ...] = (None,)

    def __init__(self, blocks: BlockManager, window: int | None = None) -> None:
        self._blocks, self._window = blocks, window
        self.tokens_per_block = blocks.tokens_per_block
        self.num_blocks = (blocks.num_blocks,)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self._blocks.used

    @property
    def cached(self) -> int:
        """Names that can be found."""
        return self._blocks.cached

    def free_blocks(self) -> int:
        """Blocks that could be taken."""
        return self._blocks.num_blocks - self._blocks.used

    def holds(self, holder: Hashable) -> bool:
        """True when it has blocks."""
        return self._blocks.held(holder) > 0

    def lists(self, holder: Hashable) -> tuple[NDArray[np.int32], ...]:
        """Its one list."""
        return (self._blocks.table(holder),)

    def find(self, names: Sequence[bytes]) -> Prefix:
        """The longest known beginning of a chain of names."""
        return Prefix((self._blocks.find(names),))

    def find_received(self, names: Sequence[bytes], position: int) -> Prefix:
        """The same: every block has everything."""
        return self.find(names)

    def can_allocate(self, needs: Sequence[Need], prefix: Prefix | None = None) -> bool:
        """True when there are blocks for new holders, the first of which begins with `prefix`."""
        shared = _NONE if prefix is None else prefix.lists[0]
        return self._blocks.can_allocate(sum(map(self._count, needs)) - len(shared), shared)

    def allocate(self, holder: Hashable, need: Need, prefix: Prefix | None = None) -> None:
        """The blocks of a new holder."""
        shared = _NONE if prefix is None else prefix.lists[0]
        self._blocks.allocate(holder, self._count(need) - len(shared), shared)

    def can_reach(self, holder: Hashable, begin: int, end: int) -> bool:
        """True when blocks for `end` tokens are there or can be taken."""
        return self._blocks.can_allocate(self._more(holder, end))

    def reach(self, holder: Hashable, begin: int, end: int) -> None:
        """Takes what is missing for `end` tokens."""
        if more := self._more(holder, end):
            self._blocks.grow(holder, more)

    def can_exchange(self, holder: Hashable, keep: Sequence[int]) -> bool:
        """True when all but the first `keep[0]` blocks can be replaced."""
        return self._blocks.can_allocate(self._blocks.held(holder) - keep[0])

    def exchange(self, holder: Hashable, keep: Sequence[int]) -> None:
        """Replaces them."""
        self._blocks.exchange(holder, keep[0])

    def fork(self, parent: Hashable, child: Hashable, tokens: int) -> list[Copy]:
        """The child goes on behind `tokens` tokens of the parent."""
        full, rest = divmod(tokens, self.tokens_per_block)
        table = self._blocks.table(parent)
        self._blocks.put_before(child, table[:full])
        return [Copy(0, int(table[full]), int(self._blocks.table(child)[full]))] if rest else []

    def rename(self, holder: Hashable, to: Hashable) -> None:
        """Everything of a holder belongs to a new one."""
        self._blocks.rename(holder, to)

    def free(self, holder: Hashable) -> None:
        """Gives everything back."""
        self._blocks.free(holder)

    def whole_from(self, position: int) -> tuple[int, ...]:
        """All blocks, or none."""
        return (0 if self._window is None or position <= self._window else _NEVER,)

    def commit(self, holder: Hashable, names: Sequence[bytes], first: int, whole: Sequence[int]) -> None:
        """Blocks [first, len(names)) can be found from now on, those before whole[0] excepted."""
        begin = max(first, whole[0])
        if begin < len(names):
            self._blocks.commit(holder, begin, names[begin:])

    def distrust(self, holder: Hashable) -> None:
        """Nobody finds its blocks any more."""
        self._blocks.distrust(holder)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Names that can be found, and that can not be found any more, since the last call."""
        return self._blocks.take_changes()

    def check_integrity(self) -> None:
        """Raises InternalError unless every block is free, idle or held, and held as often as it is counted."""
        self._blocks.check_integrity()

    def _count(self, need: Need) -> int:
        return blocks_for(need.end, self.tokens_per_block) - need.first

    def _more(self, holder: Hashable, end: int) -> int:
        return max(0, blocks_for(end, self.tokens_per_block) - self._blocks.held(holder))
