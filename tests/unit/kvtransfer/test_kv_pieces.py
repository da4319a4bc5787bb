"""Writes in pieces: the same bytes, a bounded number in flight, and a cancel that overtakes what is not posted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.agents.base import WriteState
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.errors import AgentError
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.regions import RegionPairs
from kvtransfer.transceiver.pieced_write import DEPTH, PiecedWrite, cut


def pairs_of(lengths: list[int]) -> RegionPairs:
    sizes = np.array(lengths, np.int64)
    begins = np.cumsum(sizes) - sizes
    return RegionPairs(1000 + begins, 10**9 + begins[::-1].copy(), sizes)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 60))
def test_pieces_hold_every_byte_once_and_stay_small(lengths: list[int], size: int):
    pairs = pairs_of(lengths)
    pieces = cut(pairs, size)
    moves = [
        (src + i, dst + i)
        for piece in pieces
        for src, dst, length in zip(piece.src.tolist(), piece.dst.tolist(), piece.lengths.tolist(), strict=True)
        for i in range(length)
    ]
    whole = [
        (src + i, dst + i)
        for src, dst, length in zip(pairs.src.tolist(), pairs.dst.tolist(), pairs.lengths.tolist(), strict=True)
        for i in range(length)
    ]
    assert moves == whole
    assert all(0 < piece.nbytes <= size for piece in pieces)


class World:
    """1,000 bytes in ten pieces between two loopback agents."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.source = np.arange(1000, dtype=np.int64).astype(np.uint8)
        self.target = np.zeros(1000, np.uint8)
        self.agent, self.peer = LoopbackAgent("a", self.fabric), LoopbackAgent("b", self.fabric)
        regions = [RegisteredRegion(int(one.ctypes.data), 1000, MemoryKind.DRAM) for one in (self.source, self.target)]
        self.agent.register(regions[:1])
        self.peer.register(regions[1:])
        self.agent.load_remote(self.peer.descriptor(), regions[1:])
        at = (np.array([int(one.ctypes.data)], np.int64) for one in (self.source, self.target))
        self.write = PiecedWrite(self.agent, self.peer.name, RegionPairs(*at, np.array([1000], np.int64)), 100)

    def step(self) -> WriteState:
        if self.write.can_post:
            self.write.post()
        return self.write.look().state


def test_everything_arrives():
    world = World()
    assert world.write.look().state is WriteState.IN_FLIGHT
    for _ in range(40):
        if world.step() is WriteState.DONE:
            break
    assert np.array_equal(world.source, world.target)


def test_only_a_few_pieces_are_in_flight():
    world = World()
    world.agent.hold = True
    for _ in range(10):
        world.step()
    assert world.fabric.in_flight == DEPTH


def test_cancel_overtakes_the_rest_but_waits_for_what_is_posted():
    world = World()
    world.agent.hold = True
    world.step()
    world.write.cancel("enough")
    assert not world.write.can_post
    assert world.write.look().state is WriteState.IN_FLIGHT
    world.fabric.land()
    status = world.write.look()
    assert (status.state, status.reason) == (WriteState.FAILED, "enough")
    assert not world.target[100:].any()


def test_cancel_of_a_write_that_is_posted_whole_changes_nothing():
    world = World()
    while world.step() is not WriteState.DONE:
        if not world.write._rest:
            world.write.cancel("too late")
    assert np.array_equal(world.source, world.target)


def test_failed_piece_drops_the_rest():
    world = World()
    world.agent.fail_next("link error")
    for _ in range(3):
        status = world.write.look()
        if world.write.can_post:
            world.write.post()
    assert (status.state, status.reason) == (WriteState.FAILED, "link error")


def test_piece_that_can_not_be_posted_ends_the_write():
    world = World()
    world.write.post()
    world.agent.forget_remote = None
    world.agent._remotes.clear()
    with pytest.raises(AgentError, match="not been loaded"):
        world.write.post()
    assert world.write.look().state is WriteState.FAILED
