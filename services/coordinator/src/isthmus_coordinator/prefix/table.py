"""A hash table from 16-byte keys to small numbers, for whole batches at once.

    key ──low bits──▶ bucket of 8 slots: [tag 32 bits | row] ...     full? its overflow flag says: look in the next too
    row ──▶ record: the whole key, for comparison, and its number

A batch costs a few numpy calls whatever its size: 200 look-ups take about 40 µs, and a key takes about 40 bytes.
(borghash 0.2.1 needs 29 bytes a key, but is asked key by key: 200 look-ups take 105 µs, which alone is more than a
whole choice of instances may take.) Keys are hashes already and are not hashed again. Rows never move; removed ones are
used again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
_Halves = npt.NDArray[np.uint64]
_Places = npt.NDArray[np.intp]
_Bools = npt.NDArray[np.bool_]
_Tags = npt.NDArray[np.uint32]

_SHIFT = 3
SLOTS = 1 << _SHIFT
_HALF, _ODD = np.uint64(32), np.uint64(1)
_FILL = 0.5
_SMALLEST = 128
# Overflow flags stay when keys go; a table where they are frequent is built anew.
_WORN = 0.3


def keys_of(data: bytes) -> Keys:
    """Keys joined as they travel, as an array (n, 2). Raises ValueError when the length is no multiple of 16."""
    if len(data) % 16:
        raise ValueError(f"{len(data)} bytes are no list of 16-byte keys")
    return np.frombuffer(data, dtype="<u8").reshape(-1, 2)


def distinct(keys: Keys) -> Keys:
    """Every key once."""
    if len(keys) < 2:
        return keys
    ordered = keys[np.lexsort((keys[:, 1], keys[:, 0]))]
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    return ordered[first]


class KeyTable:
    """Rows and numbers by key. Batches are arrays (n, 2) of keys; rows are int32, -1 = not there."""

    def __init__(self) -> None:
        self._records: _Halves = np.zeros((_SMALLEST, 3), dtype=np.uint64)
        self._free: list[Rows] = []
        self._end = 0  # rows from here on have never been used
        self._count = 0
        self._clear(_SMALLEST)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the table's arrays."""
        free = sum(part.nbytes for part in self._free)
        return self._records.nbytes + self._tags.nbytes + self._rows.nbytes + self._over.nbytes + free

    def find(self, keys: Keys) -> Rows:
        """The row of every key."""
        return self._search(keys)[0]

    def lookup(self, keys: Keys) -> Numbers:
        """The number of every key; 0 for one that is not there."""
        return self._search(keys)[1]

    def _candidates(self, buckets: _Places, tags: _Tags) -> tuple[_Places, Rows, _Halves]:
        """Slots of the buckets that have the key's tag: index of the key, row, record."""
        tagged: npt.NDArray[np.bool_] = self._tags.take(buckets, axis=0) == tags[:, None]
        hits = tagged.ravel().nonzero()[0]
        which = hits >> _SHIFT
        rows = self._rows.ravel().take((buckets.take(which) << _SHIFT) + (hits & SLOTS - 1))
        return which, rows, self._records.take(rows, axis=0)

    def _right(self, records: _Halves, keys: Keys, which: _Places) -> npt.NDArray[np.bool_]:
        return (records[:, 0] == keys[:, 0].take(which)) & (records[:, 1] == keys[:, 1].take(which))

    def numbers(self, rows: Rows) -> Numbers:
        """The numbers of live rows."""
        return self._records[rows, 2].astype(np.int64)

    def set_numbers(self, rows: Rows, numbers: Numbers) -> None:
        """Give live rows other numbers."""
        self._records[rows, 2] = numbers

    def all_numbers(self) -> Numbers:
        """The numbers of every live row."""
        return self.numbers(self._rows[self._rows >= 0])

    def _search(self, keys: Keys) -> tuple[Rows, Numbers]:
        buckets, tags = self._places(keys[:, 0])
        rows, numbers = self._look(keys, buckets, tags)
        missed = (rows < 0).nonzero()[0]
        while len(missed := missed[self._over[buckets[missed]]]):
            buckets[missed] = (buckets[missed] + 1) & self._mask
            more, theirs = self._look(keys[missed], buckets[missed], tags[missed])
            rows[missed], numbers[missed] = more, theirs
            missed = missed[more < 0]
        return rows, numbers

    def _look(self, keys: Keys, buckets: _Places, tags: _Tags) -> tuple[Rows, Numbers]:
        """Rows and numbers of keys, each looked for in one bucket."""
        which, rows, records = self._candidates(buckets, tags)
        right = self._right(records, keys, which)
        if right.all():
            if len(which) == len(keys):  # most often each key has one candidate, the right one
                return rows, records[:, 2].astype(np.int64)
        else:
            which, rows, records = which[right], rows[right], records[right]
        found, numbers = np.full(len(keys), -1, dtype=np.int32), np.zeros(len(keys), dtype=np.int64)
        found[which], numbers[which] = rows, records[:, 2]
        return found, numbers

    def insert(self, keys: Keys) -> Rows:
        """New rows, with number 0, for keys that are distinct and not there."""
        rows = self._take(len(keys))
        self._records[rows, :2] = keys
        self._records[rows, 2] = 0
        self._count += len(keys)
        if self._count > _FILL * SLOTS * (self._mask + 1):
            self._rebuild(rows)
        else:
            self._place(rows)
        return rows

    def remove(self, rows: Rows) -> None:
        """Take distinct rows of live keys out."""
        if not len(rows):
            return
        buckets, _ = self._places(self._records[rows, 0])
        left = np.arange(len(rows))
        while len(left):
            hits = self._rows[buckets[left]] == rows[left, None]
            here = hits.any(axis=1)
            slots = buckets[left[here]], hits.argmax(axis=1)[here]
            self._rows[slots] = -1
            self._tags[slots] = 0
            left = left[~here]
            buckets[left] = (buckets[left] + 1) & self._mask
        self._free.append(rows.astype(np.int32, copy=True))
        self._count -= len(rows)

    def _places(self, low: _Halves) -> tuple[_Places, _Tags]:
        # Tags are odd, as that of an empty slot is 0.
        return (low & np.uint64(self._mask)).astype(np.intp), (low >> _HALF | _ODD).astype(np.uint32)

    def _take(self, count: int) -> Rows:
        parts: list[Rows] = []
        missing = count
        while missing and self._free:
            part = self._free.pop()
            if len(part) > missing:
                self._free.append(part[missing:])
                part = part[:missing]
            parts.append(part)
            missing -= len(part)
        if self._end + missing > len(self._records):
            # By half: growth costs memory for as long as nobody uses it.
            size = max(self._end + missing, len(self._records) * 3 // 2)
            grown = np.zeros((size, 3), dtype=np.uint64)
            grown[: self._end] = self._records[: self._end]
            self._records = grown
        parts.append(np.arange(self._end, self._end + missing, dtype=np.int32))
        self._end += missing
        return np.concatenate(parts)

    def _clear(self, buckets: int) -> None:
        self._mask = buckets - 1
        self._tags: _Tags = np.zeros((buckets, SLOTS), dtype=np.uint32)
        self._rows: Rows = np.full((buckets, SLOTS), -1, dtype=np.int32)
        self._over: _Bools = np.zeros(buckets, dtype=bool)

    def _rebuild(self, new: Rows) -> None:
        """Place every live key, and the `new` ones, in a table with room."""
        live = np.concatenate([self._rows[self._rows >= 0], new])
        buckets = self._mask + 1
        while self._count > _FILL * SLOTS * buckets:
            buckets *= 2
        self._clear(buckets)
        step = 1 << 18  # bounds the memory of the batch
        for begin in range(0, len(live), step):
            self._place(live[begin : begin + step])

    def _place(self, rows: Rows) -> None:
        """Give every row, whose key is known, a slot."""
        buckets, tags = self._places(self._records[rows, 0])
        left = np.arange(len(rows))
        while len(left):
            order = np.argsort(buckets[left], kind="stable")
            left = left[order]
            at = buckets[left]
            begins = np.flatnonzero(np.r_[True, at[1:] != at[:-1]])
            rank = np.arange(len(left)) - np.repeat(begins, np.diff(np.r_[begins, len(left)]))
            empty = self._rows[at] < 0
            nth = (np.cumsum(empty, axis=1) == (rank + 1)[:, None]) & empty
            fits = nth.any(axis=1)
            column = nth.argmax(axis=1)[fits]
            self._rows[at[fits], column] = rows[left[fits]]
            self._tags[at[fits], column] = tags[left[fits]]
            left = left[~fits]
            self._over[buckets[left]] = True
            buckets[left] = (buckets[left] + 1) & self._mask

    def worn(self) -> bool:
        """True when so many buckets have overflowed that `refresh` is worth its time."""
        return bool(self._over.mean() > _WORN) and self._mask + 1 > _SMALLEST

    def refresh(self) -> None:
        """Build the slots anew, without the flags that removed keys have left."""
        self._rebuild(np.empty(0, dtype=np.int32))
