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
        # Neighbours, and few of them, so that lists repeat from schedule to schedule: addresses are computed once.
        first = self._random.randrange(0, len(free), 3) if count else 0
        hold = Hold(self._node, key, [*free[first:], *free[:first]][:count], quiet_since=now)
        for page in hold.pages:
            self.owner[page] = hold
        return hold

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
