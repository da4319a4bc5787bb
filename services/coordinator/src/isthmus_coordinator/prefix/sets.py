"""Interned sets of small numbers (holders), as bit masks in Python integers: a thousand holders are 160 bytes, and
blocks that the same instances hold share one set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
EMPTY = 0


class HolderSets:
    """Sets by id, counted by their users; a set that nobody uses is forgotten. Id 0 is the empty set."""

    def __init__(self) -> None:
        self._masks: list[int] = [0]
        self._ids: dict[int, int] = {0: EMPTY}
        self._uses: list[int] = [0]
        self._free: list[int] = []

    def __len__(self) -> int:
        """Sets in use, the empty one not counted."""
        return len(self._ids) - 1

    def mask(self, set_id: int) -> int:
        """Bit h is set when holder h is in the set."""
        return self._masks[set_id]

    def holds(self, ids: Ids, holder: int) -> npt.NDArray[np.bool_]:
        """Which of the sets a holder is in."""
        unique, inverse = np.unique(ids, return_inverse=True)
        inside = np.array([self._masks[one] >> holder & 1 for one in unique], dtype=bool)
        return inside[inverse]

    def add(self, ids: Ids, holder: int) -> Ids:
        """The same sets with a holder; one use of each moves to the result."""
        return self._move(ids, 1 << holder, 0)

    def discard(self, ids: Ids, holder: int) -> Ids:
        """The same sets without a holder; one use of each moves to the result."""
        return self._move(ids, 0, 1 << holder)

    def _move(self, ids: Ids, more: int, less: int) -> Ids:
        unique, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        changes: list[tuple[int, int]] = list(zip(unique.tolist(), counts.tolist(), strict=True))
        moved: list[int] = []
        for old, uses in changes:
            moved.append(self._intern((self._masks[old] | more) & ~less))
            self._use(moved[-1], uses)
        # Released only now: a set that is left and entered in one batch is not forgotten between.
        for old, uses in changes:
            self._use(old, -uses)
        return np.array(moved, dtype=np.int64)[inverse]

    def _intern(self, mask: int) -> int:
        found = self._ids.get(mask)
        if found is not None:
            return found
        if self._free:
            found = self._free.pop()
            self._masks[found] = mask
            self._uses[found] = 0
        else:
            found = len(self._masks)
            self._masks.append(mask)
            self._uses.append(0)
        self._ids[mask] = found
        return found

    def _use(self, set_id: int, uses: int) -> None:
        if set_id == EMPTY:
            return
        self._uses[set_id] += uses
        if not self._uses[set_id]:
            del self._ids[self._masks[set_id]]
            self._masks[set_id] = 0
            self._free.append(set_id)

    def uses(self) -> dict[int, int]:
        """Uses by mask, for checks."""
        return {mask: self._uses[one] for mask, one in self._ids.items() if mask}
