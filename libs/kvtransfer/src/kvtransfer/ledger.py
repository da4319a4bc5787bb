"""Who may write into which destination page. Pure: no clock, no I/O; times in seconds are passed in.

                 expose                 every writer done, never started,
    free ──────────────────▶ exposed ── quiesced or proven dead ──▶ settled ── release ──▶ free
      │                       │   ▲                                    ▲
      └─reserve─▶ reserved    │   └── reconciled ──┐                   │
                  (expose)    └── stream broken ──▶ in doubt ──────────┘

A one-sided write carries no attempt number: who exposes a page that an earlier attempt still exposes would take a late
write for its own. So pages leave `exposed` and `in doubt` only through their writers, never through time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import LedgerError
from kvtransfer.ports import RankBlocks, RequestKey, WriterOutcome
from kvtransfer.sharing import same_slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.rank_info import RankInfo

Writer = tuple[int, int]
Place = tuple[int, int]
_NO_BLOCK = -1
_FREE = 0


class PageState(Enum):
    """Where the pages of an attempt are. A page that no attempt names is free."""

    # Will be exposed when the peer can be asked; no writer knows it.
    RESERVED = "reserved"
    # Writers may write.
    EXPOSED = "exposed"
    # Writers may write and can not be asked.
    IN_DOUBT = "in doubt"
    # No write can happen any more; waits for `release`.
    SETTLED = "settled"


@dataclass(slots=True)
class _Holding:
    token: int
    pages: tuple[tuple[Place, NDArray[np.int64]], ...]
    count: int
    incarnation: bytes
    state: PageState
    since: float
    writers: dict[Writer, WriterOutcome | None] = field(default_factory=dict[Writer, WriterOutcome | None])


class Ledger:
    """One instance's destination pages. `capacity`: number of pages of each (rank, layer group).

    `memory` names the same thing for layer groups that lie in the same memory: page n of one is page n of the other.
    `page_bytes`: size of one page; without it `nbytes` is 0.
    Every method either does what it says or raises LedgerError and changes nothing.
    """

    def __init__(
        self,
        capacity: Mapping[Place, int],
        memory: Mapping[Place, Hashable] | None = None,
        page_bytes: Mapping[Place, int] | None = None,
    ) -> None:
        self._page_bytes = page_bytes or {}
        # Per page the token of the attempt that holds it, 0 = free.
        self._owner: dict[Place, NDArray[np.int64]] = {}
        shared: dict[Hashable, NDArray[np.int64]] = {}
        for place in sorted(capacity, key=lambda place: -capacity[place]):
            name = place if memory is None else memory.get(place, place)
            owner = shared.setdefault(name, np.zeros(capacity[place], np.int64))
            self._owner[place] = owner[: capacity[place]]
        self._held: dict[RequestKey, _Holding] = {}
        self._by_token: dict[int, RequestKey] = {}
        self._next_token = 1

    @classmethod
    def of(cls, ranks: Iterable[RankInfo]) -> Ledger:
        """The ledger of an instance with these ranks."""
        capacity: dict[Place, int] = {}
        memory: dict[Place, Hashable] = {}
        page_bytes: dict[Place, int] = {}
        for info in ranks:
            table = info.page_table
            for number in range(len(table.groups)):
                capacity[info.rank, number] = table.num_blocks(number)
                views = table.groups[number].views
                page_bytes[info.rank, number] = sum(int(view.entries.size.sum()) for view in views)
                # Transitive through the name: a group takes the name of the first one that it overlaps.
                first = next(other for other in range(number + 1) if other == number or same_slot(table, other, number))
                memory[info.rank, number] = memory.get((info.rank, first), (info.rank, first))
        return cls(capacity, memory, page_bytes)

    def reserve(self, key: RequestKey, pages: Sequence[RankBlocks], incarnation: bytes, now: float) -> None:
        """free -> reserved, for writers of `incarnation`. -1 entries name no page."""
        if key in self._held:
            raise LedgerError(f"attempt {key} holds pages already")
        picked = self._check_free(key, pages, now)
        token = self._next_token
        self._next_token += 1
        for place, ids in picked:
            self._owner[place][ids] = token
        count = sum(len(ids) for _, ids in picked)
        self._held[key] = _Holding(token, picked, count, incarnation, PageState.RESERVED, now)
        self._by_token[token] = key

    def expose(self, key: RequestKey, writers: Iterable[Writer], now: float) -> None:
        """reserved -> exposed to `writers`, (src_rank, dst_rank) each. Settled at once when there are none."""
        held = self._get(key)
        self._expect(key, held, PageState.RESERVED)
        held.writers = dict.fromkeys(writers)
        self._enter(held, PageState.EXPOSED if held.writers else PageState.SETTLED, now)

    def settle(self, key: RequestKey, writer: Writer, outcome: WriterOutcome, now: float) -> bool:
        """A writer is done with the attempt. True when it was the last one: the pages are settled now.

        False, and nothing changes, for an attempt or a writer that is not waited for: late and repeated notices.
        """
        held = self._held.get(key)
        if held is None or held.state not in (PageState.EXPOSED, PageState.IN_DOUBT):
            return False
        if held.writers.get(writer, outcome) is not None:
            return False
        held.writers[writer] = outcome
        if None in held.writers.values():
            return False
        self._enter(held, PageState.SETTLED, now)
        return True

    def doubt(self, key: RequestKey, now: float) -> None:
        """exposed -> in doubt: the writers can not be asked."""
        held = self._get(key)
        self._expect(key, held, PageState.EXPOSED)
        self._enter(held, PageState.IN_DOUBT, now)

    def reconcile(self, key: RequestKey, now: float) -> None:
        """in doubt -> exposed: the writers can be asked again and say that they still write."""
        held = self._get(key)
        self._expect(key, held, PageState.IN_DOUBT)
        self._enter(held, PageState.EXPOSED, now)

    def prove_dead(self, key: RequestKey, incarnation: bytes, now: float, ranks: Collection[int] | None = None) -> bool:
        """Writers have exited, by an exit report for that incarnation, and the fabric has drained: those of `ranks`, or
        all. True when no writer is left: the pages are settled now."""
        held = self._get(key)
        if held.incarnation != incarnation:
            raise LedgerError(
                f"attempt {key} is written by incarnation {held.incarnation.hex()}, not by {incarnation.hex()}"
            )
        self._expect(key, held, PageState.EXPOSED, PageState.IN_DOUBT)
        for writer, outcome in held.writers.items():
            if outcome is None and (ranks is None or writer[0] in ranks):
                held.writers[writer] = WriterOutcome.QUIESCED
        if None in held.writers.values():
            return False
        self._enter(held, PageState.SETTLED, now)
        return True

    def release(self, key: RequestKey) -> None:
        """settled or reserved -> free, once."""
        held = self._get(key)
        self._expect(key, held, PageState.SETTLED, PageState.RESERVED)
        for place, ids in held.pages:
            self._owner[place][ids] = _FREE
        del self._held[key], self._by_token[held.token]

    @property
    def capacity(self) -> int:
        """All pages, those in any state and the free ones."""
        return sum(len(owner) for owner in self._owner.values())

    def state(self, key: RequestKey) -> PageState | None:
        """None when the attempt holds nothing."""
        held = self._held.get(key)
        return None if held is None else held.state

    def pages(self, key: RequestKey) -> int:
        """Pages that the attempt holds."""
        held = self._held.get(key)
        return 0 if held is None else held.count

    def nbytes(self, key: RequestKey) -> int:
        """Bytes of the pages that the attempt holds."""
        held = self._held.get(key)
        return 0 if held is None else sum(self._page_bytes.get(place, 0) * len(ids) for place, ids in held.pages)

    def waiting_for(self, key: RequestKey) -> tuple[Writer, ...]:
        """Writers of the attempt that have not said that they are done."""
        return tuple(writer for writer, outcome in self._get(key).writers.items() if outcome is None)

    def held(self) -> dict[PageState, int]:
        """Pages by state, states with none included."""
        counts = dict.fromkeys(PageState, 0)
        for held in self._held.values():
            counts[held.state] += held.count
        return counts

    def oldest(self, now: float) -> dict[PageState, float]:
        """Seconds that the oldest attempt of each state has been in it; only states that occur."""
        ages: dict[PageState, float] = {}
        for held in self._held.values():
            ages[held.state] = max(ages.get(held.state, 0.0), now - held.since)
        return ages

    @property
    def is_empty(self) -> bool:
        """True when every page is free."""
        return not self._held

    def check_integrity(self) -> None:
        """Raises LedgerError when pages and attempts disagree. Cost: one look at every page."""
        for place, owner in self._owner.items():
            named = np.zeros_like(owner)
            for held in self._held.values():
                for where, ids in held.pages:
                    if np.shares_memory(self._owner[where], owner):
                        named[ids[ids < len(named)]] = held.token
            wrong = np.flatnonzero(named != owner)
            if len(wrong):
                page = int(wrong[0])
                raise LedgerError(f"{_name(place, page)} belongs to {self._by_token.get(int(owner[page]), 'nobody')}")
        for key, held in self._held.items():
            unsettled = None in held.writers.values()
            if unsettled != (held.state in (PageState.EXPOSED, PageState.IN_DOUBT)):
                raise LedgerError(f"attempt {key} is {held.state.value} with writers {held.writers}")

    def _check_free(
        self, key: RequestKey, pages: Sequence[RankBlocks], now: float
    ) -> tuple[tuple[Place, NDArray[np.int64]], ...]:
        picked: list[tuple[Place, NDArray[np.int64]]] = []
        for blocks in pages:
            place = (blocks.rank, blocks.layer_group)
            owner = self._owner.get(place)
            if owner is None:
                raise LedgerError(f"attempt {key}: there is no layer group {place[1]} on rank {place[0]}")
            if any(place == other for other, _ in picked):
                raise LedgerError(f"attempt {key} lists layer group {place[1]} of rank {place[0]} twice")
            ids = blocks.blocks[blocks.blocks != _NO_BLOCK].astype(np.int64)
            outside = ids[(ids < 0) | (ids >= len(owner))]
            if len(outside):
                raise LedgerError(f"attempt {key} names {_name(place, int(outside[0]))}, there are {len(owner)}")
            if len(np.unique(ids)) != len(ids):
                raise LedgerError(f"attempt {key} names a page of layer group {place[1]} on rank {place[0]} twice")
            taken = ids[owner[ids] != _FREE]
            if len(taken):
                self._refuse(key, place, int(taken[0]), now)
            picked.append((place, ids))
        return tuple(picked)

    def _refuse(self, key: RequestKey, place: Place, page: int, now: float) -> None:
        other = self._by_token[int(self._owner[place][page])]
        held = self._held[other]
        raise LedgerError(
            f"attempt {key} names {_name(place, page)}, which attempt {other} has {held.state.value} "
            f"for {now - held.since:.3f} s"
        )

    def _get(self, key: RequestKey) -> _Holding:
        held = self._held.get(key)
        if held is None:
            raise LedgerError(f"attempt {key} holds no pages")
        return held

    def _expect(self, key: RequestKey, held: _Holding, *states: PageState) -> None:
        if held.state not in states:
            waiting = [writer for writer, outcome in held.writers.items() if outcome is None]
            raise LedgerError(f"the pages of attempt {key} are {held.state.value}, writers {waiting} are open")

    def _enter(self, held: _Holding, state: PageState, now: float) -> None:
        held.state, held.since = state, now


def _name(place: Place, page: int) -> str:
    return f"page {page} of layer group {place[1]} on rank {place[0]}"
