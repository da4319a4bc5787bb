"""Changes of the reusable blocks as the coordinator hears them: in numbered messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.v1 import kv_index_pb2

from isthmus_core.block_keys import join_keys
from isthmus_worker.engine import KvEvent

# 128 KiB of keys: a snapshot of a large cache must not hold up what else the stream has to say.
KEYS_PER_MESSAGE = 8192


def events_to_pb(event: KvEvent, sequence: int) -> Iterator[kv_index_pb2.KvEvents]:
    """Messages with the numbers from `sequence` on. Removals come first: a key may be in both lists of an event that
    stands for several."""
    reset = event.reset
    for begin in range(0, len(event.removed), KEYS_PER_MESSAGE):
        removed = join_keys(event.removed[begin : begin + KEYS_PER_MESSAGE])
        yield kv_index_pb2.KvEvents(sequence=sequence, reset=reset, removed=removed)
        sequence, reset = sequence + 1, False
    for begin in range(0, len(event.stored), KEYS_PER_MESSAGE):
        stored = join_keys(event.stored[begin : begin + KEYS_PER_MESSAGE])
        yield kv_index_pb2.KvEvents(sequence=sequence, reset=reset, stored=stored)
        sequence, reset = sequence + 1, False
    if reset:
        yield kv_index_pb2.KvEvents(sequence=sequence, reset=True)
