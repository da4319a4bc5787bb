"""One instance's KV events on their way into the prefix index: snapshots, sequence, gaps. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_coordinator.prefix import PrefixIndex


@dataclass(frozen=True, slots=True)
class KvBatch:
    """Changes of an instance's reusable blocks; keys are joined, 16 bytes each. `reset` begins a snapshot."""

    sequence: int
    reset: bool
    stored: bytes
    removed: bytes


class KvStream:
    """Follows one Register stream. After `ask` nothing counts until a snapshot has begun."""

    def __init__(self, index: PrefixIndex, holder: int) -> None:
        self._index, self._holder = index, holder
        self._next: int | None = None

    @property
    def following(self) -> bool:
        """Whether what the index knows of the instance is what it has said."""
        return self._next is not None

    def ask(self) -> None:
        """A snapshot is being asked for."""
        self._next = None

    def take(self, batch: KvBatch) -> bool:
        """Apply a batch. False when one before it is missing: a snapshot is needed."""
        if batch.reset:
            self._index.reset(self._holder)
        elif self._next is None:
            return True  # said before the snapshot that was asked for
        elif batch.sequence != self._next:
            self._next = None
            return False
        self._next = batch.sequence + 1
        if batch.removed:
            self._index.remove(self._holder, batch.removed)
        if batch.stored:
            self._index.store(self._holder, batch.stored)
        return True
