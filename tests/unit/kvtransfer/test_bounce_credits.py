"""Room for chunks: blocks never overlap, everything joins again, and nobody who holds nothing is kept waiting."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.bounce.arena import Arena
from kvtransfer.bounce.credits import Credits, Given
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.errors import ArenaError
from kvtransfer.pools import MemoryKind, RegisteredRegion

steps = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=60)


@given(st.integers(1, 40), steps)
@settings(max_examples=100, deadline=None)
def test_blocks_do_not_overlap_and_join_again(units: int, plan: list[tuple[int, int]]):
    arena, taken = Arena(units * 16, 16), list[tuple[int, int]]()
    for choice, wanted in plan:
        if choice < 4 and taken:
            offset, _ = taken.pop(choice % len(taken))
            arena.give_back(offset)
        elif arena.units_of(wanted * 16) <= arena.largest_free:
            size = arena.units_of(wanted * 16)
            taken.append((arena.take(size), size))
        spans = sorted((offset, offset + size * 16) for offset, size in taken)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert all(end <= units * 16 for _, end in spans)
        assert arena.free_units == units - sum(size for _, size in taken)
    for offset, _ in taken:
        arena.give_back(offset)
    assert arena.largest_free == 1 << (units.bit_length() - 1)


def test_a_block_is_given_back_once():
    arena = Arena(64, 16)
    offset = arena.take(1)
    arena.give_back(offset)
    with pytest.raises(ArenaError, match="not taken"):
        arena.give_back(offset)
    with pytest.raises(ArenaError, match="largest has 4"):
        arena.take(8)


def test_an_arena_that_is_too_small_is_refused_with_the_least_size():
    with pytest.raises(ArenaError, match="the least is 8192 bytes"):
        Credits[str, int](8191, 1024, 8)


def test_chunks_are_granted_in_order_and_partly_when_space_is_short():
    credits = Credits[str, int](8 << 10, 1 << 10, 2)
    credits.connect("a")
    credits.connect("b")
    credits.ask("a", 1, 8 << 10)
    (first,) = credits.give()
    # One unit is kept for b, and blocks are powers of two.
    assert (first.ticket, first.nbytes) == (1, 4 << 10)
    credits.ask("a", 2, 4 << 10)
    assert credits.give() == []
    credits.ask("b", 3, 3 << 10)
    (second,) = credits.give()
    assert (second.ticket, second.nbytes) == (3, 1 << 10)
    credits.give_back(1)
    assert [one.ticket for one in credits.give()] == [2]


def test_who_holds_nothing_gets_a_unit_although_others_wait():
    credits = Credits[str, int](4 << 10, 1 << 10, 2)
    credits.connect("a")
    credits.connect("b")
    for ticket in range(5):
        credits.ask("a", ticket, 1 << 10)
    assert [one.ticket for one in credits.give()] == [0, 1, 2]
    credits.ask("b", 9, 2 << 10)
    assert [(one.ticket, one.nbytes) for one in credits.give()] == [(9, 1 << 10)]


def test_a_dropped_request_gets_nothing_and_a_granted_one_stays():
    credits = Credits[str, int](2 << 10, 1 << 10, 1)
    for ticket in (1, 2, 3):
        credits.ask("a", ticket, 1 << 10)
    credits.give()
    credits.drop(3)
    credits.drop(1)
    assert credits.granted == (1, 2)
    credits.disconnect("a")
    assert credits.granted == (1, 2)
    for ticket in (1, 2, 2):
        credits.give_back(ticket)
    assert credits.is_idle
    assert credits.free_bytes == 2 << 10
    with pytest.raises(ArenaError, match="0 bytes"):
        credits.ask("a", 4, 0)


@pytest.mark.parametrize("holds", [False, True])
def test_nothing_is_kept_for_a_user_that_has_gone(holds: bool):
    credits = Credits[str, int](2 << 10, 1 << 10, 2)
    credits.connect("a")
    credits.connect("b")
    if holds:
        credits.ask("a", 1, 1 << 10)
        credits.give()
    credits.disconnect("a")
    credits.give_back(1)
    credits.ask("b", 2, 2 << 10)
    assert [(one.ticket, one.nbytes) for one in credits.give()] == [(2, 2 << 10)]


def test_a_user_that_comes_back_before_it_has_given_all_back_keeps_its_unit():
    credits = Credits[str, int](2 << 10, 1 << 10, 2)
    credits.ask("a", 1, 1 << 10)
    credits.give()
    credits.disconnect("a")
    credits.connect("a")
    credits.give_back(1)
    credits.ask("b", 2, 2 << 10)
    assert [(one.ticket, one.nbytes) for one in credits.give()] == [(2, 1 << 10)]


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=80))
@settings(max_examples=100, deadline=None)
def test_every_request_is_granted_when_granted_chunks_come_back(users: int, plan: list[tuple[int, int, bool]]):
    credits = Credits[int, int](6 << 10, 1 << 10, users)
    for user in range(users):
        credits.connect(user)
    asked, served = 0, set[int]()
    for who, size, returns in plan:
        credits.ask(who % users, asked, size << 10)
        asked += 1
        served |= {one.ticket for one in credits.give()}
        if returns and credits.granted:
            credits.give_back(credits.granted[0])
            served |= {one.ticket for one in credits.give()}
    while credits.granted:
        credits.give_back(credits.granted[0])
        served |= {one.ticket for one in credits.give()}
    assert served == set(range(asked))
    assert credits.is_idle


@pytest.mark.parametrize(("send", "receive", "largest"), [(64, 64, 32), (64, 8, 4), (6, 64, 3), (1024, 1024, 256)])
def test_chunks_are_as_large_as_both_arenas_allow(send: int, receive: int, largest: int):
    mib = 1 << 20
    mine, theirs = (RegisteredRegion(1 << 40, size * mib, MemoryKind.DRAM) for size in (send, receive))
    limits = BouncePolicy(send=mine).limits(mine, theirs)
    assert (limits.smallest, limits.largest // mib) == (mib, largest)


def test_chunks_that_wait_for_somebody_else_hold_half_at_most():
    credits: Credits[str, int] = Credits(8, 1, 2)
    assert credits.take_now("a", 1, 3) == Given(1, 0, 3)
    assert credits.take_now("a", 2, 2) is None
    assert credits.take_now("b", 3, 5) is None
    credits.keep(1)
    second = credits.take_now("a", 2, 2)
    assert second is not None
    # What waits for nobody finds the rest, less than it asked for rather than late.
    credits.ask("a", 4, 4)
    (given,) = credits.give()
    assert 1 <= given.nbytes < 4
    credits.ask("b", 6, 1)
    assert not credits.give()
    assert credits.take_now("b", 7, 1) is None, "somebody waits"
    credits.give_back(4)
    assert [one.ticket for one in credits.give()] == [6]
    for ticket in (1, 2, 6):
        credits.drop(ticket)
        credits.give_back(ticket)
    assert credits.is_idle
    assert credits.take_now("b", 8, 4) is not None


def test_a_newcomer_finds_room_however_long_others_wait():
    credits: Credits[str, int] = Credits(8, 1, 4)
    for ticket in range(9):
        credits.take_now("cut off", ticket, 1)
    assert len(credits.granted) == 4
    credits.ask("newcomer", 99, 8)
    (given,) = credits.give()
    assert (given.ticket, given.nbytes) == (99, 4)
