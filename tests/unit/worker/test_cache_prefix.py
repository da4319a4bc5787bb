"""The block manager with names: sharing, reuse, eviction, and a slow model of the same rules beside it."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from isthmus_core.errors import InternalError
from isthmus_worker.cache import BlockManager


def names(text: str) -> list[bytes]:
    """A chain: every name says all letters so far."""
    return [text[: index + 1].encode() for index in range(len(text))]


def filled(text: str, num_blocks: int = 8) -> BlockManager:
    """A manager in which one holder has computed `text` and is gone."""
    blocks = BlockManager(num_blocks, 4)
    keep(blocks, text)
    return blocks


def keep(blocks: BlockManager, text: str) -> None:
    """One holder after the other: finds, allocates the rest, names it, goes."""
    shared = blocks.find(names(text))
    blocks.allocate(text, len(text) - len(shared), shared)
    blocks.commit(text, len(shared), names(text)[len(shared) :])
    blocks.free(text)
    blocks.check_integrity()


def test_what_is_named_is_found_as_far_as_it_goes():
    blocks = filled("abcd")
    assert blocks.used == 0
    assert blocks.cached == 4
    assert len(blocks.find(names("abxd"))) == 2
    assert len(blocks.find(names("abcdefgh"))) == 4
    assert len(blocks.find(names("b"))) == 0


def test_a_found_block_has_one_place_and_two_holders():
    blocks = filled("abcd")
    hits = blocks.find(names("ab"))
    blocks.allocate("one", 1, hits)
    blocks.allocate("two", 1, hits)
    assert blocks.used == 4
    assert blocks.table("one")[:2].tolist() == blocks.table("two")[:2].tolist() == hits.tolist()
    blocks.free("one")
    blocks.check_integrity()
    assert blocks.used == 3
    blocks.free("two")
    assert blocks.used == 0
    assert len(blocks.find(names("abcd"))) == 4


def test_the_end_of_a_chain_is_evicted_before_its_beginning():
    blocks = filled("abcd", num_blocks=4)
    blocks.allocate("new", 3)
    assert len(blocks.find(names("abcd"))) == 1
    blocks.check_integrity()


def test_the_least_recently_used_chain_is_evicted_first():
    blocks = filled("ab", num_blocks=6)
    keep(blocks, "cd")
    keep(blocks, "ef")
    keep(blocks, "ab")
    blocks.allocate("new", 2)
    assert [len(blocks.find(names(text))) for text in ("ab", "cd", "ef")] == [2, 0, 2]


def test_free_blocks_are_taken_before_anything_is_evicted():
    blocks = filled("abc", num_blocks=5)
    blocks.allocate("new", 2)
    assert blocks.cached == 3


def test_held_blocks_are_never_evicted():
    blocks = filled("abcd", num_blocks=4)
    blocks.allocate("holds", 0, blocks.find(names("abc")))
    assert blocks.can_allocate(1)
    assert not blocks.can_allocate(2)
    with pytest.raises(InternalError, match="asked for 2 blocks"):
        blocks.allocate("new", 2)
    blocks.allocate("new", 1)
    assert len(blocks.find(names("abcd"))) == 3


def test_of_two_equal_blocks_one_is_kept():
    blocks = BlockManager(8, 4)
    blocks.allocate("one", 3)
    blocks.allocate("two", 3)
    blocks.commit("one", 0, names("ab"))
    before = blocks.table("two")
    blocks.commit("two", 0, names("abc"))
    assert blocks.table("two").tolist() == [*blocks.table("one")[:2].tolist(), before[2]]
    assert before.tolist() != blocks.table("two").tolist(), "a table that somebody has is never changed in place"
    assert blocks.used == 4
    blocks.check_integrity()
    blocks.commit("two", 0, names("abc"))
    blocks.check_integrity()


def test_changes_are_told_once_and_what_came_and_went_is_not_told():
    blocks = filled("abc", num_blocks=3)
    assert blocks.take_changes() == (tuple(names("abc")), ())
    assert blocks.take_changes() == ((), ())
    keep(blocks, "x")
    blocks.allocate("new", 2)
    assert blocks.take_changes() == ((b"x",), (b"abc", b"ab", b"a"))
    blocks.free("new")
    keep(blocks, "yz")
    blocks.allocate("all", 3)
    assert blocks.take_changes() == ((), (b"x",))


def test_what_is_not_trusted_is_not_found():
    blocks = BlockManager(8, 4)
    blocks.allocate("one", 3)
    blocks.commit("one", 0, names("abc"))
    blocks.allocate("two", 0, blocks.find(names("ab")))
    blocks.distrust("one")
    assert len(blocks.find(names("abc"))) == 0
    blocks.free("two")
    blocks.free("one")
    blocks.check_integrity()
    assert blocks.cached == 0


def test_blocks_put_before_others_are_shared():
    blocks = BlockManager(8, 4)
    blocks.allocate("parent", 3)
    blocks.allocate("child", 1)
    own = blocks.table("child").tolist()
    blocks.put_before("child", blocks.table("parent")[:2])
    assert blocks.table("child").tolist() == [*blocks.table("parent")[:2].tolist(), *own]
    blocks.free("parent")
    blocks.check_integrity()
    assert blocks.used == 3


@pytest.mark.parametrize("harm", ["references", "twice", "name"])
def test_the_integrity_check_sees_a_broken_ledger(harm: str):
    blocks = filled("abcd")
    blocks.allocate("one", 2)
    if harm == "references":
        blocks._references[blocks.table("one")[0]] += 1
    elif harm == "twice":
        blocks._stack[blocks._free - 1] = blocks.table("one")[0]
    else:
        blocks._cache._name_of[int(blocks._stack[0])] = b"other"
    with pytest.raises(InternalError):
        blocks.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_operations_keeps_content_under_its_name(seed: int):
    """`content`: what was last written into each block. A block that is found must hold what its name says."""
    random, blocks = Random(seed), BlockManager(12, 4)
    content: list[bytes] = [b""] * 12
    chains: dict[int, str] = {}
    hits = 0
    for number in range(3000):
        if random.random() < 0.55:
            text = "".join(random.choice("ab") for _ in range(random.randint(1, 5)))
            shared = blocks.find(names(text)[: random.randint(0, len(text))])
            hits += len(shared)
            assert [content[block] for block in shared] == names(text)[: len(shared)]
            if not blocks.can_allocate(len(text) - len(shared), shared):
                continue
            blocks.allocate(number, len(text) - len(shared), shared)
            for block, name in zip(blocks.table(number)[len(shared) :], names(text)[len(shared) :], strict=True):
                content[block] = name
            if random.random() < 0.8:
                blocks.commit(number, len(shared), names(text)[len(shared) :])
            chains[number] = text
        elif chains:
            holder = random.choice(list(chains))
            assert [content[block] for block in blocks.table(holder)] == names(chains.pop(holder))
            blocks.free(holder)
        blocks.check_integrity()
        counted = Counter(np.concatenate([np.empty(0, np.int32), *map(blocks.table, chains)]).tolist())
        assert blocks.used == len(counted)
    assert hits > 300
