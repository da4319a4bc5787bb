"""Whose a page is, as the scheduler of an instance sees it. The same page numbers on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .script import PAGES_PER_NODE
from .violation import Violation

if TYPE_CHECKING:
    from random import Random

    from kvtransfer.ports import RequestKey


@dataclass(eq=False, slots=True)
class Hold:
    """Pages that one leg of an attempt has been given. `closed`: the transfer has said that no write touches them any
    more. `writes`: posted writes that read or write them and whose bytes may still move; `posted`: there was one;
    `quiet_since`: when the last one was over; `unheard`: the agent will never say of one that it is."""

    node: str
    key: RequestKey
    pages: list[int]
    closed: bool = False
    freed: bool = False
    writes: int = 0
    posted: bool = False
    quiet_since: float = 0.0
    unheard: bool = False

    def close(self) -> None:
        """The transfer says that it is over. A write that is still out there is the bug all of this is about."""
        if self.writes:
            raise Violation(f"{self.node} is told that {self.key} is over under {self.writes} writes")
        self.closed = True


# Neighbours, by their number.
_RUNS = [
    [[(first + place) % PAGES_PER_NODE for place in range(count)] for first in range(0, PAGES_PER_NODE, 3)]
    for count in range(PAGES_PER_NODE)
]


class Pages:
    """The page allocator of one instance."""

    def __init__(self, node: str, random: Random) -> None:
        self._node, self._random = node, random
        self.owner: list[Hold | None] = [None] * PAGES_PER_NODE

    def take(self, key: RequestKey, count: int, now: float) -> Hold | None:
        """Pages for a leg, None when there are not enough."""
        free = [page for page, owner in enumerate(self.owner) if owner is None]
        if len(free) < count:
            return None
        hold = Hold(self._node, key, self._pick(free, count), quiet_since=now)
        for page in hold.pages:
            self.owner[page] = hold
        return hold

    def _pick(self, free: list[int], count: int) -> list[int]:
        """Few different lists, so that they repeat from schedule to schedule: addresses are computed once. The same few
        also make pages come back soon after they were given up, when a late write would hit them."""
        runs = [run for run in _RUNS[count] if all(self.owner[page] is None for page in run)]
        if runs:
            return list(self._random.choice(runs))
        first = self._random.randrange(0, len(free), 3)
        return [*free[first:], *free[:first]][:count]

    def free(self, hold: Hold) -> None:
        """From now on anybody may use them."""
        if hold.writes:
            raise Violation(f"{self._node} frees the pages of {hold.key} under {hold.writes} writes")
        if hold.freed:
            raise Violation(f"{self._node} frees the pages of {hold.key} twice")
        hold.freed = True
        for page in hold.pages:
            self.owner[page] = None

    @property
    def empty(self) -> bool:
        """True when all are free."""
        return not any(self.owner)
