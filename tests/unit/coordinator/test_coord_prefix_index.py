"""The prefix index against a dictionary of sets: what a holder has, what a prompt can reuse, what is forgotten."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_coordinator.kv_stream import KvBatch, KvStream
from isthmus_coordinator.prefix import PrefixIndex
from isthmus_coordinator.prefix.table import KeyTable, keys_of


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


class Slow:
    """The same with sets."""

    def __init__(self) -> None:
        self.has: dict[int, set[int]] = {}

    def reuse(self, prompt: list[int], holders: int) -> list[int]:
        def leading(holder: int) -> int:
            mine = self.has.get(holder, set())
            return next((at for at, key in enumerate(prompt) if key not in mine), len(prompt))

        return [leading(holder) for holder in range(holders)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_it_knows_what_sets_know(seed: int):
    rng = random.Random(seed)
    index, slow = PrefixIndex(1 << 20), Slow()
    # Keys that share buckets, tags, halves.
    space = [rng.choice((1, 1 << 32, 1 << 64, 1 << 33)) * rng.randrange(40) for _ in range(60)]
    for _ in range(rng.randrange(1, 30)):
        holder = rng.randrange(12)
        some = rng.choices(space, k=rng.randrange(0, 30))
        what = rng.random()
        if what < 0.55:
            assert index.store(holder, keys(*some)) == 0
            slow.has.setdefault(holder, set()).update(some)
        elif what < 0.85:
            index.remove(holder, keys(*some))
            slow.has.get(holder, set()).difference_update(some)
        else:
            index.drop(holder)
            slow.has.pop(holder, None)
        index.check()
    assert len(index) == len({key for mine in slow.has.values() for key in mine})
    for holder, mine in slow.has.items():
        assert index.blocks(holder) == len(mine)
    prompt = rng.sample(space, rng.randrange(1, 40))
    assert index.reuse(keys(*prompt), 12).tolist() == slow.reuse(prompt, 12)


def test_a_large_table_finds_everything_and_only_that():
    rng = np.random.default_rng(0)
    there, absent = rng.integers(0, 2**63, size=(2, 20_000, 2), dtype=np.uint64)
    table = KeyTable()
    for begin in range(0, len(there), 777):
        rows = table.insert(there[begin : begin + 777])
        table.set_numbers(rows, np.arange(begin, begin + len(rows)) + 1)
    assert (table.lookup(there) == np.arange(len(there)) + 1).all()
    assert not table.lookup(absent).any()
    table.remove(table.find(there[::2]))
    assert not table.lookup(there[::2]).any()
    assert (table.lookup(there[1::2]) == np.arange(len(there))[1::2] + 1).all()
    table.refresh()
    assert (table.lookup(there[1::2]) == np.arange(len(there))[1::2] + 1).all()
    assert len(table) == len(there) // 2


def test_rows_are_used_again_so_that_churn_needs_no_more_memory():
    index = PrefixIndex(1 << 20)
    rng = np.random.default_rng(0)
    sizes: list[int] = []
    for _ in range(60):
        data = rng.integers(0, 2**63, size=(2000, 2), dtype=np.uint64).tobytes()
        index.store(3, data)
        index.remove(3, data)
        sizes.append(index.nbytes)
    assert sizes[-1] <= sizes[4] * 1.2
    assert len(index) == 0
    index.check()


def test_what_does_not_fit_is_refused_and_asked_for_again_once_there_is_room():
    index = PrefixIndex(10)
    assert index.store(1, keys(*range(1, 9))) == 0
    assert index.store(2, keys(1, 2, *range(20, 26))) == 4
    assert len(index) == 10
    assert index.blocks(2) == 4
    assert index.incomplete() == []
    index.drop(1)
    assert index.incomplete() == [2]
    index.reset(2)
    assert index.incomplete() == []
    assert index.store(2, keys(1, 2, *range(20, 26))) == 0
    index.check()


def test_data_that_is_no_list_of_keys_is_refused():
    index = PrefixIndex(10)
    for refuse in (lambda: index.store(0, b"x" * 17), lambda: index.remove(0, b"x"), lambda: index.reuse(b"xyz", 1)):
        with pytest.raises(ValueError, match="16-byte keys"):
            refuse()
    assert len(keys_of(b"")) == 0
    assert index.reuse(b"", 4).tolist() == [0, 0, 0, 0]


def batch(sequence: int, *stored: int, reset: bool = False, removed: tuple[int, ...] = ()) -> KvBatch:
    return KvBatch(sequence, reset, keys(*stored), keys(*removed))


def test_a_stream_counts_from_its_snapshot_and_a_gap_needs_another():
    index = PrefixIndex(100)
    stream = KvStream(index, 5)
    stream.ask()
    assert stream.take(batch(7, 9))  # said before the snapshot
    assert index.blocks(5) == 0
    assert stream.take(batch(1, 1, 2, reset=True))
    assert stream.take(batch(2, 3, removed=(1,)))
    assert index.reuse(keys(2, 3), 6).tolist() == [0, 0, 0, 0, 0, 2]
    assert not stream.take(batch(4, 4))
    assert not stream.following
    assert stream.take(batch(5, 5))  # nothing counts until the next snapshot
    assert index.reuse(keys(5), 6)[5] == 0
    assert stream.take(batch(1, 8, reset=True))
    assert index.blocks(5) == 1
    index.check()
