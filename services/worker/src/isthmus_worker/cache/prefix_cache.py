"""Names of complete KV blocks, and which of them may be thrown away. Pure; the block manager is its only user.

A block with a name is *idle* while nobody holds it: it can be found, and it can be evicted. Work per block is a dict
operation; a chain of names can not be looked up in any other way than name by name.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class PrefixCache:
    """One block per name, one name per block. Blocks are numbers in [0, num_blocks)."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # Oldest first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # Names of which the state is another one than at the last `take_changes`: are they there?
        self._changes: dict[bytes, bool] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def idle(self) -> int:
        """Blocks that nobody holds."""
        return len(self._idle)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known beginning of a chain of names."""
        found: list[int] = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def has(self, block: int) -> bool:
        """True when a block has a name."""
        return block in self._name_of

    def is_idle(self, block: int) -> bool:
        """True when a block has a name and nobody holds it."""
        return block in self._idle

    def add(self, block: int, name: bytes) -> int:
        """Gives a held block a name; returns the block that has it: this one, or one that had it before."""
        known = self._block_of.get(name)
        if known is not None:
            return known
        if block in self._name_of:
            raise InternalError(f"block {block} has a name already")
        self._block_of[name], self._name_of[block] = block, name
        self._note(name, there=True)
        return block

    def remove(self, block: int) -> None:
        """Takes a held block's name away; nothing when it has none."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
            self._note(name, there=False)

    def rest(self, blocks: Sequence[int]) -> None:
        """Named blocks that nobody holds any more, in token order. The last of them goes first: a block without those
        before it could not be found."""
        self._idle.update(dict.fromkeys(reversed(blocks)))

    def wake(self, blocks: Iterable[int]) -> None:
        """Idle blocks that are held again."""
        for block in blocks:
            del self._idle[block]

    def evict(self, count: int) -> list[int]:
        """The `count` blocks that have been idle for the longest time; they have no name any more."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self.remove(block)
        return evicted

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Names that are there, and that are not there any more, since the last call. A name is in one of the two."""
        changes, self._changes = self._changes, {}
        stored = tuple(name for name, there in changes.items() if there)
        return stored, tuple(name for name, there in changes.items() if not there)

    def _note(self, name: bytes, *, there: bool) -> None:
        if name in self._changes:
            del self._changes[name]  # there and gone again, or the other way round
        else:
            self._changes[name] = there

    def idle_blocks(self) -> list[int]:
        """Blocks that nobody holds, the next one to be evicted first."""
        return list(self._idle)

    def check_integrity(self) -> None:
        """Raises InternalError unless names and blocks match one to one and every idle block has a name."""
        names = {block: name for name, block in self._block_of.items()}
        if names != self._name_of:
            raise InternalError(f"{len(names)} names of blocks, {len(self._name_of)} blocks with names: they differ")
        if nameless := [block for block in self._idle if block not in self._name_of]:
            raise InternalError(f"block {nameless[0]} is idle without a name")
