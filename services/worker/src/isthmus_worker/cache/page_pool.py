"""The pages of one block list: free, idle or held, and how often. Pure.

A page with a name is *idle* while nobody holds it: it can be found, and it can be evicted, the one first that has been
idle for the longest time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import InternalError
from isthmus_worker.cache.base import NO_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from numpy.typing import NDArray


class PagePool:
    """`evicted(page)` is called for every page that loses its name to make room."""

    def __init__(self, num_pages: int, evicted: Callable[[int], None]) -> None:
        self.num_pages, self._evicted = num_pages, evicted
        # A stack: free ids are _stack[:_free], the top is taken first.
        self._stack: NDArray[np.int32] = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._free = num_pages
        self.references: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        # Oldest first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def left(self) -> int:
        """Pages that can be taken."""
        return self._free + len(self._idle)

    def left_beside(self, pages: NDArray[np.int32]) -> int:
        """Pages that can be taken when `pages` may not be."""
        return self.left - sum(page in self._idle for page in pages.tolist())

    def take(self, count: int) -> NDArray[np.int32]:
        """New pages, held once; there must be as many."""
        while count > self._free:
            page = next(iter(self._idle))
            self._evicted(page)
            self.forget(page)
        taken = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self.references[taken] = 1
        return taken

    def hold(self, pages: NDArray[np.int32]) -> None:
        """One more holder of each; they have a place already."""
        for page in pages[self.references[pages] == 0].tolist():
            del self._idle[page]
        self.references[pages] += 1

    def drop(self, pages: NDArray[np.int32], named: Callable[[int], bool]) -> None:
        """One holder less of each, in token order. Pages with a name that nobody holds are idle: the last one is the
        first to go, since it could not be found without those before it."""
        self.references[pages] -= 1
        unheld = pages[self.references[pages] == 0]
        keep = np.fromiter(map(named, unheld.tolist()), np.bool_, len(unheld))
        self._idle.update(dict.fromkeys(reversed(unheld[keep].tolist())))
        self._push(unheld[~keep])

    def forget(self, page: int) -> None:
        """A page has lost its name: when nobody holds it, it is free."""
        if page in self._idle:
            del self._idle[page]
            self._push(np.array([page], np.int32))

    def check_integrity(
        self, name: str, held: Mapping[Hashable, NDArray[np.int32]], named: Callable[[int], bool]
    ) -> None:
        """Raises InternalError naming a page and who holds it unless every page is in exactly one place, is held as
        often as it is counted, and has a name where it is idle. `held`: pages of every holder, -1 for none."""
        counted = np.zeros(self.num_pages, np.int64)
        for pages in held.values():
            np.add.at(counted, pages[pages != NO_BLOCK], 1)
        idle = np.array(list(self._idle), np.int32)
        nobodys = np.concatenate((self._stack[: self._free], idle))
        places = np.bincount(nobodys, minlength=self.num_pages) + (counted > 0)
        nameless = np.zeros(self.num_pages, np.bool_)
        nameless[[page for page in idle.tolist() if not named(page)]] = True
        for wrong, values, words in (
            (counted != self.references, counted, "is held {} times, counted otherwise"),
            (places != 1, places, "is in {} places (free, idle, held)"),
            (nameless, places, "is idle without a name"),
        ):
            if wrong.any():
                page = int(np.flatnonzero(wrong)[0])
                holders = [str(holder) for holder, pages in held.items() if page in pages]
                raise InternalError(
                    f"the block ledger is broken: block {page} of {name} {words.format(int(values[page]))}; held by "
                    f"{', '.join(holders) or 'nobody'}; {int(wrong.sum())} of {self.num_pages} blocks are wrong"
                )

    def _push(self, pages: NDArray[np.int32]) -> None:
        self._stack[self._free : self._free + len(pages)] = pages[::-1]
        self._free += len(pages)
