"""Both cache managers against a slow model of them: whose bytes are in which block, whatever is asked in any order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isthmus_core import block_keys
from isthmus_core.errors import InternalError
from isthmus_worker.cache import BlockManager, BlockTable, CacheManager
from isthmus_worker.cache.base import Need
from isthmus_worker.cache.radix_cache import RadixCache

SIZE = 4
WINDOW = 6
ROOT = b"r" * 16


def block_table(num_blocks: int = 24) -> CacheManager:
    return BlockTable(BlockManager(num_blocks, SIZE), WINDOW)


def radix(num_blocks: int = 24, windowed: int = 14) -> CacheManager:
    return RadixCache((num_blocks, windowed), (None, WINDOW), SIZE)


MANAGERS = {"block_table": block_table, "radix": radix}


@dataclass
class Sequence:
    """A holder as the slow model knows it: its tokens, how many of them have KV, and what was named."""

    tokens: list[int]
    computed: int = 0
    committed: int = 0
    whole: tuple[int, ...] = ()
    names: list[bytes] = field(default_factory=list)

    def name(self, count: int) -> list[bytes]:
        packed = np.array(self.tokens[: count * SIZE], "<u4").tobytes()
        return block_keys.chain(ROOT, packed, SIZE)


# Two kinds of layers: what they see. With one block list both lie in its blocks.
LAYERS = (None, WINDOW)
Written = dict[tuple[int, int], tuple[int, ...]]
STREAMS = ([0, 1] * 20, [0, 1, 1] * 14)


class Managers(RuleBasedStateMachine):
    """`written[layer]`: (block, place in it) -> the tokens up to the one whose KV it holds, as a kernel would do it."""

    kind = "radix"

    @initialize()
    def start(self) -> None:
        self.cache = MANAGERS[self.kind]()
        self.live: dict[int, Sequence] = {}
        self.written: tuple[Written, ...] = ({}, {})
        self.number = 0
        self.known: set[bytes] = set()

    # --- the slow model of a kernel

    def layers(self, holder: int) -> list[tuple[int | None, Written, list[int]]]:
        lists = self.cache.lists(holder)
        own = lists if len(lists) == len(LAYERS) else lists * len(LAYERS)
        return [(window, *pair) for window, *pair in zip(LAYERS, self.written, [t.tolist() for t in own], strict=True)]

    def write(self, holder: int, begin: int, end: int) -> None:
        """Positions [begin, end) of a sequence get their KV."""
        tokens = self.live[holder].tokens
        for _, written, table in self.layers(holder):
            for position in range(begin, end):
                assert table[position // SIZE] >= 0, "a token has nowhere to go"
                written[table[position // SIZE], position % SIZE] = tuple(tokens[: position + 1])

    def receive(self, holder: int, reused: list[int]) -> None:
        """A peer writes what is not here; of a prompt beyond the window those layers get what the next token sees."""
        tokens = self.live[holder].tokens
        for (window, written, table), blocks in zip(self.layers(holder), reused, strict=True):
            low = len(tokens) - window + 1 if window is not None and len(tokens) > window else 0
            for position in range(max(low, blocks * SIZE), len(tokens)):
                if table[position // SIZE] < 0:
                    continue  # nobody sees it, so it is not asked for
                written[table[position // SIZE], position % SIZE] = tuple(tokens[: position + 1])

    def read(self, holder: int, position: int) -> None:
        """The token at `position` sees the KV of exactly these tokens."""
        tokens = self.live[holder].tokens
        for window, written, table in self.layers(holder):
            for at in range(0 if window is None else max(0, position - window + 1), position):
                assert written.get((table[at // SIZE], at % SIZE)) == tuple(tokens[: at + 1]), (window, at)

    def commit(self, holder: int) -> None:
        one = self.live[holder]
        complete = one.computed // SIZE
        if complete > one.committed:
            self.cache.commit(holder, one.name(complete), one.committed, one.whole)
            one.committed = complete

    # --- what a scheduler does

    @rule(stream=st.sampled_from(STREAMS), length=st.integers(1, 40), last=st.integers(0, 1), receive=st.booleans())
    def admit(self, stream: list[int], length: int, last: int, receive: bool) -> None:
        one = Sequence([*stream[: length - 1], last])
        names = one.name((length - 1) // SIZE)
        prefix = self.cache.find_received(names, length) if receive else self.cache.find(names)
        reused = list(map(len, prefix.lists))
        known, end = min(reused) * SIZE, length + 1
        need = Need(length, end, end) if receive else Need(known, min(end, known + 8), end)
        if not self.cache.can_allocate([need], prefix):
            return
        holder, self.number = self.number, self.number + 1
        self.cache.allocate(holder, need, prefix)
        self.live[holder] = one
        if receive:
            one.whole, one.computed = self.cache.whole_from(length), length
            self.receive(holder, reused * (3 - len(reused)))
            self.commit(holder)
        else:
            one.whole, one.computed, one.committed = (0,) * len(reused), known, known // SIZE
        self.read(holder, one.computed)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 8), token=st.integers(0, 1))
    def step(self, data: st.DataObject, count: int, token: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.live)))
        one = self.live[holder]
        if one.computed == len(one.tokens):
            one.tokens.append(token)
        count = min(count, len(one.tokens) - one.computed)
        end = one.computed + count
        if not self.cache.can_reach(holder, one.computed, end):
            return
        self.cache.reach(holder, one.computed, end)
        self.write(holder, one.computed, end)
        for position in range(one.computed, end):
            self.read(holder, position)
        one.computed = end
        self.commit(holder)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.live)))
        one = self.live[holder]
        tokens = one.computed
        if tokens != len(one.tokens) or not tokens:
            return
        need = Need(tokens, tokens + 2, tokens + 2, tokens // SIZE)
        if not self.cache.can_allocate([need]):
            return
        child, self.number = self.number, self.number + 1
        self.cache.allocate(child, need)
        for copy in self.cache.fork(holder, child, tokens):
            for layer, written in enumerate(self.written):
                if layer == copy.number or len(self.cache.num_blocks) == 1:
                    for at in range(SIZE):
                        written[copy.dst, at] = written.get((copy.src, at), ())
        full = tokens // SIZE
        self.live[child] = Sequence(list(one.tokens), tokens, min(full, one.committed), one.whole)
        self.read(child, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.live)))
        self.cache.free(holder)
        del self.live[holder]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.live)))
        self.cache.distrust(holder)
        if len(self.live) == 1:
            # Nobody else has its blocks: whatever is wrong with them, nobody will read it.
            for _, written, table in self.layers(holder):
                written.update({(block, at): (9,) for block in table for at in range(SIZE)})
        self.free_one(holder)

    def free_one(self, holder: int) -> None:
        self.cache.free(holder)
        del self.live[holder]

    # --- what must always hold

    @invariant()
    def whole(self) -> None:
        self.cache.check_integrity()
        stored, removed = self.cache.take_changes()
        self.known = (self.known | set(stored)) - set(removed)
        assert len(self.known) == self.cache.cached

    def teardown(self) -> None:
        for holder in list(self.live):
            self.free_one(holder)
        self.cache.check_integrity()
        assert self.cache.used == 0


class BlockTables(Managers):
    """The same of the other manager."""

    kind = "block_table"


QUICK = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestRadix = pytest.mark.timeout(120)(Managers.TestCase)
TestRadix.settings = QUICK
TestBlockTable = pytest.mark.timeout(120)(BlockTables.TestCase)
TestBlockTable.settings = QUICK


def test_a_block_that_left_the_window_is_free_and_the_others_are_not():
    cache = radix(24, 14)
    cache.allocate("long", Need(0, 8, 64))
    for begin in range(0, 64, 8):
        cache.reach("long", begin, begin + 8)
        full, windowed = cache.lists("long")
        seen = max(0, begin - WINDOW + 1) // SIZE
        assert (full >= 0).all()
        assert windowed[:seen].tolist() == [-1] * seen
        assert (windowed[seen : (begin + 8) // SIZE] >= 0).all()
    cache.free("long")
    cache.check_integrity()


def test_the_longest_prefix_needs_only_what_the_window_shows():
    """The blocks in front of the window may have gone; a prompt that ends before them can not begin there."""
    cache = radix(24, 14)
    one = Sequence(list(range(40)))
    cache.allocate("one", Need(0, 40, 41))
    cache.reach("one", 0, 40)
    cache.commit("one", one.name(10), 0, (0, 0))
    cache.reach("one", 39, 40)
    cache.free("one")
    # The windowed list is needed by somebody else: its idle blocks go, the oldest first.
    cache.allocate("two", Need(0, 12 * SIZE, 12 * SIZE))
    prefix = cache.find(one.name(10))
    assert {len(blocks) for blocks in prefix.lists} == {10} or not len(prefix.lists[0])
    received = cache.find_received(one.name(10), 41)
    assert len(received.lists[0]) == 10, "the list that keeps everything has it still"


@pytest.mark.parametrize("kind", sorted(MANAGERS))
def test_a_planted_leak_is_named_with_its_holder(kind: str):
    cache = MANAGERS[kind]()
    cache.allocate("innocent", Need(0, 8, 8))
    cache.allocate("guilty", Need(0, 8, 8))
    inner = cache._blocks if isinstance(cache, BlockTable) else cache
    tables = inner._tables
    stolen = tables["innocent"]
    tables["guilty"] = stolen
    with pytest.raises(InternalError, match=r"block 0 .*(innocent|guilty)"):
        cache.check_integrity()


@pytest.mark.parametrize("kind", sorted(MANAGERS))
def test_what_can_not_be_had_is_refused_and_changes_nothing(kind: str):
    cache = MANAGERS[kind]()
    cache.allocate("first", Need(0, 16, 16))
    too_much = Need(0, 4, 24 * SIZE)
    assert not cache.can_allocate([too_much])
    with pytest.raises(InternalError, match="asked for"):
        cache.allocate("second", too_much)
    assert not cache.can_reach("first", 16, 200)
    with pytest.raises(InternalError, match="asked for"):
        cache.reach("first", 16, 200)
    with pytest.raises(InternalError, match="already"):
        cache.allocate("first", Need(0, 4, 4))
    with pytest.raises(InternalError, match="holds no blocks"):
        cache.free("second")
    cache.check_integrity()
    cache.free("first")
    assert cache.used == 0
