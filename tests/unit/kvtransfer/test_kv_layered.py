"""Layer by layer: nothing is posted before its layers are there, and the bytes are those of one write."""

from __future__ import annotations

import numpy as np
import pytest

from kv_storage import GUARD, Shape, Storage, instance
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.bounce_ports import BounceChunk, ChunkReady, Grant, MeetSource, PeerWord, ScatterOrder
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.peer_plan import build_plan
from kvtransfer.pools import RegisteredRegion
from kvtransfer.ports import (
    CancelWrite,
    Extent,
    LoadPeer,
    RankBlocks,
    RequestKey,
    TokenRange,
    TransferNotice,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceRole, Topology
from kvtransfer.transceiver.layer_progress import LayerProgress
from kvtransfer.transceiver.layered_write import layer_slices
from kvtransfer.transceiver.probing import host_scratch
from kvtransfer.transceiver.rank import RankTransceiver

I32 = np.int32
KEY = RequestKey(1 << 40)
BLOCKS = 8


class Event:
    """Reached when it is told so."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


class World:
    """A rank that writes blocks 1, 2 of three layers to blocks 5, 0 while step 1 computes them."""

    def __init__(
        self,
        order: str,
        destination: str = "layer_major",
        shape: Shape | None = None,
        bouncing: BouncePolicy | None = None,
        arena: RegisteredRegion | None = None,
    ) -> None:
        fabric = LoopbackFabric()
        self.src, self.dst = Storage(Shape(), order, BLOCKS), Storage(shape or Shape(), destination, BLOCKS)
        self.layers, self.events = LayerProgress(), list[object]()
        self.agent = LoopbackAgent("c", fabric)
        self.rank = RankTransceiver(
            self.src.page_table(),
            0,
            Topology(),
            self.agent,
            self.events.append,
            bouncing=bouncing,
            layers=self.layers,
        )
        self.rank.start()
        peer_agent, policy = LoopbackAgent("g", fabric), None if arena is None else BouncePolicy(receive=arena)
        self.remote = RankTransceiver(self.dst.page_table(), 0, Topology(), peer_agent, [].append, bouncing=policy)
        self.remote.start()
        self.peer = instance(self.remote.info)
        self.rank.handle(LoadPeer(self.peer, bounce=arena is not None))
        self.src.fill(np.arange(BLOCKS, dtype=I32), seed=1)
        self.before = self.dst.memory.copy()
        self.events.clear()

    def order(self, step: int) -> None:
        lists = (np.array([1, 2], I32), np.array([5, 0], I32))
        peer = (self.peer.instance_id, self.peer.incarnation)
        source, target = ((RankBlocks(0, 0, one),) for one in lists)
        self.rank.handle(WriteOrder(KEY, *peer, TokenRange(0, 7), source, target, step=step))

    def poll(self, times: int = 20) -> None:
        for _ in range(times):
            self.rank.poll()

    def expected(self, below: int) -> np.ndarray:
        """The destination when the layers below a number have been written."""
        plan = build_plan(self.rank.info, self.peer.ranks[0])
        memory = self.before.copy()
        # A slice of one layer each.
        for end, part in layer_slices(plan, 3):
            if end <= below:
                pairs = part.instantiate({0: np.array([1, 2], I32)}, {0: np.array([5, 0], I32)}, TokenRange(0, 7))
                src, dst = pairs.src - self.src.base + GUARD, pairs.dst - self.dst.base + GUARD
                for a, b, n in zip(src.tolist(), dst.tolist(), pairs.lengths.tolist(), strict=True):
                    memory[b : b + n] = self.src.memory[a : a + n]
        return memory

    def notice(self) -> TransferNotice:
        (notice,) = self.events
        assert isinstance(notice, TransferNotice)
        return notice


@pytest.mark.parametrize(("order", "destination"), [("slot_major", "layer_major"), ("layer_major", "slot_major_gaps")])
def test_every_layer_goes_as_soon_as_the_host_has_seen_its_event(order: str, destination: str):
    world = World(order, destination)
    world.order(step=world.layers.next_step)
    world.poll()
    np.testing.assert_array_equal(world.dst.memory, world.before)
    world.layers.begin()
    for layer in range(3):
        event = Event()
        world.layers.done(layer + 1, event)
        world.poll()
        # Launched is not written.
        np.testing.assert_array_equal(world.dst.memory, world.expected(layer))
        event.reached = True
        world.poll()
        np.testing.assert_array_equal(world.dst.memory, world.expected(layer + 1))
    notice = world.notice()
    assert notice.outcome is WriterOutcome.DELIVERED
    assert set(notice.extents) == {Extent(0, view, TokenRange(0, 7), 0, 3) for view in (0, 1)}
    assert notice.stats.why.startswith("layer by layer")
    assert notice.stats.bytes == 12 * world.src.shape.buffer


def test_the_slices_together_are_the_whole_write():
    world = World("slot_major", shape=Shape(tokens_per_block=16))
    plan = build_plan(world.rank.info, world.peer.ranks[0])
    lists = ({0: np.array([1, 2], I32)}, {0: np.array([5], I32)}, TokenRange(0, 7))
    parts = [part.resolve(*lists) for _, part in layer_slices(plan)]
    assert sum(one.nbytes for one in parts) == plan.resolve(*lists).nbytes
    assert [end for end, _ in layer_slices(plan)] == [1, 2, 3]
    assert [end for end, _ in layer_slices(plan, 2)] == [2, 3]


def test_a_step_that_is_over_is_written_at_once():
    world = World("slot_major")
    world.layers.begin()
    world.layers.end()
    world.order(step=1)
    world.poll()
    assert world.notice().stats.why.startswith("direct")
    np.testing.assert_array_equal(world.dst.memory, world.expected(3))


def test_a_poll_says_whether_it_has_posted():
    """The thread that polls sleeps longer and longer while nothing happens, and not after a post."""
    world = World("slot_major")
    world.order(step=1)
    world.layers.begin()
    said: list[bool] = []
    for layer in range(3):
        world.rank.poll()
        world.rank.poll()
        said.append(world.rank.posted)
        world.layers.done(layer + 1)
        world.rank.poll()
        said.append(world.rank.posted)
    assert said == [False, True] * 3


def test_an_order_of_a_later_step_waits_for_it():
    world = World("slot_major")
    world.layers.begin()
    world.layers.done(3)
    world.order(step=2)
    world.poll()
    assert world.events == []
    world.layers.end()
    world.layers.begin()
    world.poll()
    assert world.events == []
    world.layers.done(3)
    world.poll()
    assert world.notice().outcome is WriterOutcome.DELIVERED


def test_a_cancel_between_layers_quiesces_and_the_rest_is_never_written():
    world = World("slot_major")
    world.order(step=1)
    world.poll()
    world.layers.begin()
    world.layers.done(1)
    world.poll()
    world.rank.handle(CancelWrite(KEY))
    world.layers.done(3)
    world.layers.end()
    world.poll()
    assert world.notice().outcome is WriterOutcome.QUIESCED
    np.testing.assert_array_equal(world.dst.memory, world.expected(1))


def test_others_are_written_while_a_layer_is_waited_for():
    world = World("slot_major")
    world.order(step=1)
    world.poll()
    other = RequestKey((1 << 40) + 1)
    peer = (world.peer.instance_id, world.peer.incarnation)
    lists = (RankBlocks(0, 0, np.array([3], I32)),), (RankBlocks(0, 0, np.array([4], I32)),)
    world.rank.handle(WriteOrder(other, *peer, TokenRange(0, 4), *lists))
    world.poll()
    assert world.notice().key == other


def test_progress_is_of_one_step_and_in_order():
    layers = LayerProgress()
    assert layers.reached(0, 5)
    assert not layers.reached(1, 0)
    layers.begin()
    first, second = Event(), Event()
    layers.done(1, first)
    layers.done(2, second)
    second.reached = True
    assert not layers.reached(1, 1)
    first.reached = True
    assert layers.reached(1, 2)
    assert not layers.reached(1, 3)
    layers.end()
    assert layers.reached(1, 1 << 31)
    assert layers.next_step == 2
    assert not layers.reached(2, 0)


class Arenas:
    """The hubs between a world's rank and its peer: every chunk that is asked for gets room, and is scattered."""

    def __init__(self, destination: str) -> None:
        (send, keep), (receive, also) = host_scratch(1 << 20), host_scratch(1 << 20)
        self.keep = keep, also
        bouncing = BouncePolicy(send=send, staging=StagingPolicy.ALWAYS)
        self.world = World("slot_major", destination, bouncing=bouncing, arena=receive)
        # Layers of the chunks that were asked for, by what has been computed at that time.
        self.told: list[BounceChunk] = []
        own = instance(self.world.rank.info, role=InstanceRole.CONTEXT)
        self.who = own.instance_id, own.incarnation
        self.world.remote.handle(MeetSource(own, self.world.peer))

    def poll(self) -> None:
        world = self.world
        for _ in range(20):
            world.rank.poll()
            world.remote.poll()
            words, world.events[:] = (
                [one for one in world.events if isinstance(one, PeerWord)],
                [one for one in world.events if not isinstance(one, PeerWord)],
            )
            for one in words:
                if isinstance(one.body, ChunkReady):
                    world.rank.handle(Grant(one.body.name, 0, one.body.nbytes))
                else:
                    self.told.append(one.body)
                    lists = (RankBlocks(0, 0, np.array([5, 0], I32)),)
                    world.remote.handle(ScatterOrder(*self.who, one.body, TokenRange(0, 7), lists))


@pytest.mark.parametrize("destination", ["slot_major", "layer_major", "slot_major_gaps"])
def test_chunks_go_layer_by_layer_too(destination: str):
    """In a layer-major destination all K are packed before all V: a layer's two chunks lie far apart."""
    arenas = Arenas(destination)
    world = arenas.world
    world.order(step=1)
    arenas.poll()
    assert arenas.told == [], "no room is asked for before the step"
    world.layers.begin()
    for layer in range(3):
        event = Event()
        world.layers.done(layer + 1, event)
        arenas.poll()
        np.testing.assert_array_equal(world.dst.memory, world.expected(layer))
        event.reached = True
        arenas.poll()
        np.testing.assert_array_equal(world.dst.memory, world.expected(layer + 1))
    assert len(arenas.told) == (6 if destination == "layer_major" else 3)
    notice = world.notice()
    assert notice.outcome is WriterOutcome.DELIVERED
    assert notice.stats.why.startswith("layer by layer, bounced")
    assert notice.stats.bounced == 12 * world.src.shape.buffer


def test_chunks_of_a_step_that_is_over_are_cut_as_ever():
    arenas = Arenas("layer_major")
    arenas.world.layers.begin()
    arenas.world.layers.end()
    arenas.world.order(step=1)
    arenas.poll()
    assert len(arenas.told) == 1
    np.testing.assert_array_equal(arenas.world.dst.memory, arenas.world.expected(3))


def test_a_cancel_between_chunks_of_layers():
    arenas = Arenas("layer_major")
    world = arenas.world
    world.order(step=1)
    world.layers.begin()
    world.layers.done(1)
    arenas.poll()
    world.rank.handle(CancelWrite(KEY))
    world.layers.done(3)
    world.layers.end()
    arenas.poll()
    assert world.notice().outcome is WriterOutcome.QUIESCED
    np.testing.assert_array_equal(world.dst.memory, world.expected(1))
