"""Readers of the prefix cache: a reset first, then changes; one that does not read holds little."""

from __future__ import annotations

import asyncio

from isthmus_worker.engine import KvEvent
from isthmus_worker.process_engine.cached_keys import CachedKeys


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Follower:
    """What a reader believes, from nothing but events."""

    def __init__(self, keys: CachedKeys) -> None:
        self.events = keys.follow()
        self.known: set[bytes] = set()
        self.resets = 0

    async def read(self) -> KvEvent:
        async with asyncio.timeout(5):
            event = await anext(self.events)
        if event.reset:
            self.known = set()
            self.resets += 1
        assert not set(event.stored) & set(event.removed)
        self.known = (self.known - set(event.removed)) | set(event.stored)
        return event


async def test_a_reader_begins_with_everything_and_follows():
    keys = CachedKeys()
    keys.apply(KvEvent(stored=(key(1), key(2))))
    reader = Follower(keys)
    assert (await reader.read()).reset
    assert reader.known == {key(1), key(2)}
    keys.apply(KvEvent(stored=(key(3),), removed=(key(1),)))
    assert await reader.read() == KvEvent(stored=(key(3),), removed=(key(1),))
    assert reader.resets == 1


async def test_changes_that_were_not_read_come_as_one_event_with_the_last_word():
    keys = CachedKeys()
    reader = Follower(keys)
    await reader.read()
    keys.apply(KvEvent(stored=(key(1), key(2))))
    keys.apply(KvEvent(removed=(key(1),)))
    keys.apply(KvEvent(stored=(key(3),), removed=(key(2),)))
    keys.apply(KvEvent(stored=(key(2),)))
    event = await reader.read()
    assert not event.reset
    assert reader.known == {key(2), key(3)}


async def test_a_reader_that_falls_far_behind_is_told_everything_instead():
    keys = CachedKeys()
    slow, quick = Follower(keys), Follower(keys)
    await slow.read()
    await quick.read()
    for number in range(20_000):
        keys.apply(KvEvent(stored=(key(number),), removed=(key(number - 8),) if number >= 8 else ()))
        if number % 100 == 0:
            await quick.read()
    pending = [len(reader.changes) for reader in keys._readers]
    assert max(pending) <= 8 + 1024, "what nobody reads does not grow"
    assert (await slow.read()).reset
    await quick.read()
    assert slow.known == quick.known == {key(number) for number in range(19_992, 20_000)}
    assert quick.resets == 1


async def test_the_end_of_the_engine_is_the_end_of_the_stream():
    keys = CachedKeys()
    keys.apply(KvEvent(stored=(key(1),)))
    reader, late = Follower(keys), Follower(keys)
    await reader.read()
    waiting = asyncio.create_task(reader.read())
    await asyncio.sleep(0)
    keys.close()
    assert await waiting == KvEvent(reset=True)
    assert [event async for event in reader.events] == []
    assert [event async for event in late.events] == [KvEvent(reset=True)]


async def test_a_reader_that_stops_is_forgotten():
    keys = CachedKeys()
    reader = Follower(keys)
    await reader.read()
    await reader.events.aclose()  # type: ignore[attr-defined]
    assert not keys._readers
