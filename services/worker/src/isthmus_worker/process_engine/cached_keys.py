"""Keys of the blocks that the engine can reuse, and the readers who follow them. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from isthmus_worker.engine import KvEvent

# Changes that a reader may leave unread, beside as many keys as there are: then it is told everything instead.
_SLACK = 1024


class _Reader:
    """What one reader has not read: the last word on each key, bounded."""

    def __init__(self) -> None:
        self.changes: dict[bytes, bool] = {}
        self.reset = True
        self.arrived = asyncio.Event()
        self.arrived.set()


class CachedKeys:
    """The set of reusable keys, as the engine's events tell it. One event loop owns it.

    Memory is bounded by the blocks of the cache: a reader holds at most one entry per key, and when that grows past the
    keys there are, a reset replaces them all.
    """

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._readers: set[_Reader] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, event: KvEvent) -> None:
        """A change, told by the engine; an event names a key at most once."""
        self._keys.difference_update(event.removed)
        self._keys.update(event.stored)
        for reader in self._readers:
            if not reader.reset:
                reader.changes.update(dict.fromkeys(event.removed, False))
                reader.changes.update(dict.fromkeys(event.stored, True))
                if len(reader.changes) > len(self._keys) + _SLACK:
                    reader.changes.clear()
                    reader.reset = True
            reader.arrived.set()

    def close(self) -> None:
        """The engine is gone, and the cache with it: readers end after one last reset."""
        self._keys.clear()
        self._closed = True
        for reader in self._readers:
            reader.changes.clear()
            reader.reset = True
            reader.arrived.set()

    async def follow(self) -> AsyncIterator[KvEvent]:
        """All keys as a reset, then changes, until `close`."""
        reader = _Reader()
        self._readers.add(reader)
        try:
            while True:
                await reader.arrived.wait()
                reader.arrived.clear()
                closed = self._closed
                if reader.reset or reader.changes:
                    yield self._take(reader)
                if closed:
                    return
        finally:
            self._readers.discard(reader)

    def _take(self, reader: _Reader) -> KvEvent:
        changes, reader.changes = reader.changes, {}
        if reader.reset:
            reader.reset = False
            return KvEvent(stored=tuple(self._keys), reset=True)
        stored = tuple(key for key, there in changes.items() if there)
        return KvEvent(stored, tuple(key for key, there in changes.items() if not there))
