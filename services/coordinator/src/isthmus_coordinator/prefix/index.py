"""Which holder has which block: keys of KV blocks -> interned set of holders. No I/O, no clock.

A holder is a small number (the coordinator gives one to each start of an instance). What a holder has is not listed by
holder but logged: rows in the order they were stored. The log is read when the holder goes, so that this costs what it
had and no more, and is cut when most of it is stale. The number of blocks is bounded: what does not fit is refused, the
holder is known to be incomplete, and its instance is asked for everything once there is room.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from isthmus_coordinator.prefix.sets import EMPTY, HolderSets
from isthmus_coordinator.prefix.table import KeyTable, Rows, distinct, keys_of
from isthmus_core.errors import InternalError

_LOG_SLACK = 1024
# Room that must be there before refused holders are asked again, as a share of the bound.
_ROOM = 0.1


class _Holder:
    """What one holder has: how much, and the log that leads to it."""

    __slots__ = ("blocks", "length", "log")

    def __init__(self) -> None:
        self.log: list[Rows] = []
        self.length = 0
        self.blocks = 0


class PrefixIndex:
    """At most `max_blocks` different blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max = max_blocks
        self._table = KeyTable()
        self._sets = HolderSets()
        self._holders: dict[int, _Holder] = {}
        self._incomplete: set[int] = set()

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._table)

    def blocks(self, holder: int) -> int:
        """Blocks of a holder; 0 for one that has none."""
        found = self._holders.get(holder)
        return 0 if found is None else found.blocks

    def incomplete(self) -> list[int]:
        """Holders of which blocks were refused, once there is room for them again."""
        return sorted(self._incomplete) if self._incomplete and len(self) <= self._max * (1 - _ROOM) else []

    def reset(self, holder: int) -> None:
        """A holder begins to tell everything it has."""
        self.drop(holder)
        self._holders[holder] = _Holder()

    def store(self, holder: int, data: bytes) -> int:
        """Blocks became reusable. Returns how many keys were refused because the index is full. Raises ValueError for
        data that is no list of keys."""
        keys = distinct(keys_of(data))
        mine = self._holders.setdefault(holder, _Holder())
        rows = self._table.find(keys)
        new = np.flatnonzero(rows < 0)
        room = max(0, self._max - len(self._table))
        refused = max(0, len(new) - room)
        if refused:
            self._incomplete.add(holder)
            new = new[:room]
        rows[new] = self._table.insert(keys[new])
        rows = rows[rows >= 0]
        sets = self._table.numbers(rows)
        others = ~self._sets.holds(sets, holder)
        added = rows[others]
        self._table.set_numbers(added, self._sets.add(sets[others], holder))
        mine.blocks += len(added)
        mine.length += len(added)
        mine.log.append(added)
        if mine.length > 2 * mine.blocks + _LOG_SLACK or len(mine.log) > _LOG_SLACK:
            self._cut_log(holder, mine)
        return refused

    def remove(self, holder: int, data: bytes) -> None:
        """Blocks are no longer reusable; keys that the holder did not have are fine. Raises ValueError for data that is
        no list of keys."""
        mine = self._holders.get(holder)
        keys = distinct(keys_of(data))
        if mine is None:
            return
        rows = self._table.find(keys)
        rows = rows[rows >= 0]
        rows = rows[self._sets.holds(self._table.numbers(rows), holder)]
        mine.blocks -= len(rows)
        self._take_out(rows, holder)

    def drop(self, holder: int) -> None:
        """A holder is gone, and everything it had."""
        mine = self._holders.pop(holder, None)
        self._incomplete.discard(holder)
        if mine is not None and mine.log:
            self._take_out(self._rows_of(mine, holder), holder)

    def reuse(self, data: bytes, holders: int) -> npt.NDArray[np.int64]:
        """Leading blocks of a prompt that each holder in [0, holders) has. Raises ValueError for data that is no list
        of keys."""
        keys = keys_of(data)
        if not len(keys):
            return np.zeros(holders, dtype=np.int64)
        ids = self._table.lookup(keys)
        # Neighbours mostly have one set: one step for each run of equal ones.
        begins = [0, *((ids[1:] != ids[:-1]).nonzero()[0] + 1).tolist(), len(ids)]
        alive, masks, runs = (1 << holders) - 1, list[bytes](), list[int]()
        size = holders + 7 >> 3
        for begin, end in itertools.pairwise(begins):
            alive &= self._sets.mask(int(ids[begin]))
            if not alive:
                break
            masks.append(alive.to_bytes(size, "little"))
            runs.append(end - begin)
        if masks:
            table = np.frombuffer(b"".join(masks), dtype=np.uint8).reshape(len(masks), size)
            bits = np.unpackbits(table, axis=1, bitorder="little", count=holders)
            # Holders only ever fall out along a chain: a holder has the sum of the runs that it was in.
            return np.array(runs, dtype=np.int64) @ bits
        return np.zeros(holders, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Memory of arrays."""
        logs = sum(part.nbytes for holder in self._holders.values() for part in holder.log)
        return self._table.nbytes + logs

    def check(self) -> None:
        """Compare all counts with what they count. Raises InternalError."""
        live = self._table.all_numbers()
        ids, uses = np.unique(live, return_counts=True)
        counted = {self._sets.mask(one): int(count) for one, count in zip(ids.tolist(), uses.tolist(), strict=True)}
        blocks = {holder: mine.blocks for holder, mine in self._holders.items() if mine.blocks}
        found: dict[int, int] = {}
        for holder, mine in self._holders.items():
            if count := len(self._rows_of(mine, holder)):
                found[holder] = count
        if len(live) != len(self._table) or EMPTY in ids or counted != self._sets.uses() or found != blocks:
            raise InternalError(f"prefix index: {len(live)} rows for {len(self._table)} keys, holders {blocks}/{found}")

    def _take_out(self, rows: Rows, holder: int) -> None:
        left = self._sets.discard(self._table.numbers(rows), holder)
        self._table.set_numbers(rows, left)
        self._table.remove(rows[left == EMPTY])
        if self._table.worn():
            self._table.refresh()

    def _rows_of(self, mine: _Holder, holder: int) -> Rows:
        rows = np.unique(np.concatenate([*mine.log, np.empty(0, dtype=np.int32)]))
        return rows[self._sets.holds(self._table.numbers(rows), holder)]

    def _cut_log(self, holder: int, mine: _Holder) -> None:
        rows = self._rows_of(mine, holder)
        mine.log, mine.length = [rows], len(rows)
