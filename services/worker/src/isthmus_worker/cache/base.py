"""What the scheduler asks of a cache manager, whichever kind it is.

A sequence has one list of blocks for each *block list* of the cache. A list that everything is seen of has all blocks
of the sequence; a list with a window of W positions has those that the token at position p and later ones can see, from
the one that holds position p - W + 1 on, and -1 in place of the blocks in front of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

NO_BLOCK = -1


class Copy(NamedTuple):
    """Block `src` of block list `number` is to be copied to `dst`."""

    number: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The beginning of a prompt that is here. `lists`: blocks from token 0 on, int32, for each block list."""

    lists: tuple[NDArray[np.int32], ...]

    def blocks(self, number: int) -> int:
        """Where the blocks of a list end."""
        return len(self.lists[number])


@dataclass(frozen=True, slots=True)
class Need:
    """What a new holder must have. Its next token is at position `begin`: what no token from there on sees is not
    needed. Lists with a window get blocks up to token `soon` now and the others later (`reach`); lists without one up
    to token `end` at once. Blocks before number `first` are another holder's and will be shared: see `fork`."""

    begin: int
    soon: int
    end: int
    first: int = 0


class CacheManager(Protocol):
    """Owner of all blocks; called from the executor thread only.

    Contract
    - A holder is any hashable name. Its lists are read-only arrays: every change makes new ones.
    - `can_x` answers and changes nothing; `x` raises InternalError when `can_x` would say no, or when the holder has
      blocks already (allocate), or has none (everything else).
    - `find` is for a prompt that is computed here: all lists end at one block, and have what the next token sees.
      `find_received` is for one that a peer writes: each list ends where its own blocks end, and has what a token at
      `position` sees. Hold what was found (`allocate`) before anything else is taken.
    - `commit` names blocks [first, len(names)) of a holder: they are complete and will not be written again. `whole`:
      first block of each list of which every byte is there. Where a name has a block, the holder goes on with it.
    - `reach` takes blocks for tokens up to `end`, and gives back what no token from `begin` on can see.
    - `exchange` puts other blocks in place of all but the first `keep` of each list; nobody shares those.
    - `fork` shares the whole blocks before token `tokens` with a child that has its own behind them, and returns what
      is to be copied.
    - `take_changes`: names that can be found, and that can not be found any more, since the last call.
    - `check_integrity` raises InternalError naming a block and who holds it unless every block is in exactly one place.
    """

    tokens_per_block: int
    # Of each block list.
    num_blocks: tuple[int, ...]
    windows: tuple[int | None, ...]

    @property
    def used(self) -> int:
        """Blocks that somebody holds, of the list that has the fewest left, as if it had max(num_blocks)."""
        ...

    @property
    def cached(self) -> int:
        """Names that can be found."""
        ...

    def free_blocks(self) -> int:
        """Blocks that could be taken, of the list that has the fewest left, as if it had max(num_blocks)."""
        ...

    def holds(self, holder: Hashable) -> bool: ...

    def lists(self, holder: Hashable) -> tuple[NDArray[np.int32], ...]: ...

    def find(self, names: Sequence[bytes]) -> Prefix: ...

    def find_received(self, names: Sequence[bytes], position: int) -> Prefix: ...

    def can_allocate(self, needs: Sequence[Need], prefix: Prefix | None = None) -> bool: ...

    def allocate(self, holder: Hashable, need: Need, prefix: Prefix | None = None) -> None: ...

    def can_reach(self, holder: Hashable, begin: int, end: int) -> bool: ...

    def reach(self, holder: Hashable, begin: int, end: int) -> None: ...

    def can_exchange(self, holder: Hashable, keep: Sequence[int]) -> bool: ...

    def exchange(self, holder: Hashable, keep: Sequence[int]) -> None: ...

    def fork(self, parent: Hashable, child: Hashable, tokens: int) -> list[Copy]: ...

    def rename(self, holder: Hashable, to: Hashable) -> None: ...

    def free(self, holder: Hashable) -> None: ...

    def whole_from(self, position: int) -> tuple[int, ...]:
        """First block of each list of which every byte comes in a hand-off of what a token at `position` sees."""
        ...

    def commit(self, holder: Hashable, names: Sequence[bytes], first: int, whole: Sequence[int]) -> None: ...

    def distrust(self, holder: Hashable) -> None: ...

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]: ...

    def check_integrity(self) -> None: ...


def first_seen(window: int | None, position: int, tokens_per_block: int) -> int:
    """The first block of a list that a token at `position` sees."""
    return 0 if window is None else max(0, position - window + 1) // tokens_per_block


def blocks_for(tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // tokens_per_block)
