"""Blocks have one owner and come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_core.errors import InternalError
from isthmus_worker.cache import BlockManager


def test_blocks_for_counts_the_partial_block():
    blocks = BlockManager(8, 4)
    assert [blocks.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_fresh_pool_hands_out_neighbours():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 3)
    blocks.grow("a", 2)
    assert blocks.table("a").tolist() == [0, 1, 2, 3, 4]
    assert blocks.table("a").dtype == np.int32


def test_freed_blocks_can_be_had_again_and_all_of_them():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 5)
    blocks.allocate("b", 3)
    assert not blocks.can_allocate(1)
    blocks.free("a")
    assert blocks.can_allocate(5)
    assert not blocks.can_allocate(6)
    blocks.allocate("c", 5)
    assert sorted([*blocks.table("b"), *blocks.table("c")]) == list(range(8))


def test_a_table_that_was_handed_out_does_not_change():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 2)
    before = blocks.table("a")
    blocks.grow("a", 1)
    assert before.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 7


@pytest.mark.parametrize(
    "misuse",
    [
        lambda blocks: blocks.free("nobody"),
        lambda blocks: blocks.table("nobody"),
        lambda blocks: blocks.grow("nobody", 1),
        lambda blocks: blocks.allocate("a", 1),
        lambda blocks: blocks.allocate("b", 7),
        lambda blocks: blocks.grow("a", 7),
    ],
)
def test_misuse_is_refused_and_changes_nothing(misuse):
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 2)
    with pytest.raises(InternalError):
        misuse(blocks)
    blocks.check_integrity()
    assert blocks.used == 2


def test_freeing_twice_is_refused():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 2)
    blocks.free("a")
    with pytest.raises(InternalError, match="holds no blocks"):
        blocks.free("a")


def test_the_integrity_check_sees_a_block_with_two_owners():
    blocks = BlockManager(8, 4)
    blocks.allocate("a", 2)
    blocks.allocate("b", 2)
    blocks._tables["b"] = blocks._tables["a"]
    with pytest.raises(InternalError, match="held 2 times"):
        blocks.check_integrity()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=60))
def test_any_sequence_of_operations_keeps_every_block(operations: list[tuple[int, int]]):
    blocks, held = BlockManager(16, 4), dict[int, int]()
    for holder, size in operations:
        if holder in held and size == 0:
            blocks.free(holder)
            del held[holder]
        elif blocks.can_allocate(size):
            (blocks.grow if holder in held else blocks.allocate)(holder, size)
            held[holder] = held.get(holder, 0) + size
        blocks.check_integrity()
        assert blocks.used == sum(held.values())
        for one, count in held.items():
            assert len(blocks.table(one)) == count
    for holder in held:
        blocks.free(holder)
    blocks.check_integrity()
    assert blocks.used == 0
