"""The rank role: every order ends in exactly one notice per destination, and a notice is never given too early."""

from __future__ import annotations

import dataclasses
import os
import socket

import numpy as np
import pytest

from isthmus_core.framing import FrameSocket
from kv_storage import GUARD, Shape, Storage, instance
from kvtransfer import wire
from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.errors import AgentBroken, AgentUnavailable, GeometryError
from kvtransfer.peer_plan import combine_digests, plan_digest
from kvtransfer.ports import (
    CancelWrite,
    Extent,
    ForgetPeer,
    LoadPeer,
    PeerLoaded,
    RankBlocks,
    RankReady,
    RankToHub,
    RequestKey,
    TokenRange,
    TransferNotice,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceInfo, InstanceRole, Topology
from kvtransfer.transceiver.agent_thread import AgentThread
from kvtransfer.transceiver.rank import RankTransceiver

KEY = RequestKey(1 << 40)
OTHER = RequestKey((1 << 40) + 1)
I32 = np.int32


class World:
    """A context rank and a generation rank over loopback agents; time advances by one at every look."""

    def __init__(self) -> None:
        self.fabric, self.time = LoopbackFabric(), 0.0
        self.src, self.dst = Storage(Shape(), "slot_major", 8), Storage(Shape(), "layer_major", 8)
        self.agent, self.peer_agent = LoopbackAgent("c", self.fabric), LoopbackAgent("g", self.fabric)
        self.events: list[RankToHub] = []
        self.rank = RankTransceiver(
            self.src.page_table(), 0, Topology(), self.agent, self.events.append, clock=self._clock
        )
        self.rank.start()
        (ready,) = self.take()
        assert isinstance(ready, RankReady)
        assert ready.info == self.rank.info
        remote = RankTransceiver(self.dst.page_table(), 0, Topology(), self.peer_agent, [].append)
        remote.start()
        self.peer = instance(remote.info)
        self.src.fill(np.arange(8, dtype=I32), seed=1)

    def _clock(self) -> float:
        self.time += 1.0
        return self.time

    def take(self) -> list[RankToHub]:
        events, self.events[:] = list(self.events), []
        return events

    def load(self, peer: InstanceInfo | None = None) -> PeerLoaded:
        self.rank.handle(LoadPeer(peer or self.peer))
        (loaded,) = self.take()
        assert isinstance(loaded, PeerLoaded)
        return loaded

    def order(self, key: RequestKey = KEY, src=(1, 2), dst=(5, 0), ranks=(0,), **changes) -> WriteOrder:
        order = WriteOrder(
            key,
            self.peer.instance_id,
            self.peer.incarnation,
            TokenRange(0, 7),
            (RankBlocks(0, 0, np.array(src, I32)),),
            tuple(RankBlocks(rank, 0, np.array(dst, I32)) for rank in ranks),
        )
        return dataclasses.replace(order, **changes)

    def notices(self, polls: int = 5) -> list[TransferNotice]:
        for _ in range(polls):
            self.rank.poll()
        events = self.take()
        assert all(isinstance(event, TransferNotice) for event in events)
        return [event for event in events if isinstance(event, TransferNotice)]

    def notice(self) -> TransferNotice:
        (notice,) = self.notices()
        assert self.rank.open_writes == 0
        return notice


@pytest.fixture
def world() -> World:
    return World()


def test_a_write_is_delivered_with_extents_and_costs(world: World):
    loaded = world.load()
    context = instance(world.rank.info, role=InstanceRole.CONTEXT, name="context-0")
    assert combine_digests([loaded.plan_digest]) == plan_digest(context, world.peer)
    world.rank.handle(world.order())
    notice = world.notice()
    assert (notice.key, notice.src_rank, notice.dst_rank) == (KEY, 0, 0)
    assert notice.outcome is WriterOutcome.DELIVERED
    assert set(notice.extents) == {Extent(0, view, TokenRange(0, 7), 0, 3) for view in (0, 1)}
    assert notice.stats.bytes == 2 * 6 * world.src.shape.buffer
    assert notice.stats.descriptors == 12
    assert notice.stats.path == "loopback"
    assert min(notice.stats.queue, notice.stats.plan, notice.stats.post, notice.stats.wire) > 0
    size = world.src.shape.buffer
    for source, target in ((1, 5), (2, 0)):
        for layer in range(3):
            a, b = GUARD + world.src.where(layer, 1, source), GUARD + world.dst.where(layer, 1, target)
            np.testing.assert_array_equal(world.dst.memory[b : b + size], world.src.memory[a : a + size])


def test_loading_twice_answers_the_same(world: World):
    assert world.load() == world.load()


def test_an_incompatible_peer_gets_every_reason(world: World):
    table = Storage(Shape(heads=3, unit=8, tokens_per_block=8), "slot_major", 4).page_table()
    rank = dataclasses.replace(world.peer.ranks[0], page_table=table)
    loaded = world.load(dataclasses.replace(world.peer, ranks=(rank,)))
    assert len(loaded.incompatibilities) >= 3
    assert loaded.plan_digest == b""
    world.rank.handle(world.order())
    assert world.notice().outcome is WriterOutcome.NEVER_STARTED


def test_an_unreachable_peer_is_refused_with_the_reason_and_can_be_tried_again(world: World):
    world.peer_agent.die()
    (reason,) = world.load().incompatibilities
    assert "no loopback agent" in reason.yours
    world.fabric.add(world.peer_agent)
    assert world.load().incompatibilities == ()


@pytest.mark.parametrize("changes", [{"instance_id": "other"}, {"incarnation": os.urandom(16)}])
def test_unknown_peers_are_never_written_to(world: World, changes):
    world.load()
    world.rank.handle(world.order(**changes))
    notice = world.notice()
    assert notice.outcome is WriterOutcome.NEVER_STARTED
    assert "not loaded" in notice.reason
    assert (world.dst.memory == 0xEE).all()


def test_one_notice_for_each_destination_rank(world: World):
    world.load()
    world.rank.handle(world.order(ranks=(0, 1)))
    first, second = world.notices()
    assert (first.dst_rank, first.outcome) == (0, WriterOutcome.DELIVERED)
    assert (second.dst_rank, second.outcome) == (1, WriterOutcome.NEVER_STARTED)


def test_bad_blocks_never_start(world: World):
    world.load()
    world.rank.handle(world.order(dst=(3, 3)))
    notice = world.notice()
    assert notice.outcome is WriterOutcome.NEVER_STARTED
    assert "twice" in notice.reason
    assert (world.dst.memory == 0xEE).all()


def test_an_empty_need_is_delivered_without_a_write(world: World):
    world.load()
    world.rank.handle(world.order(dst=(), tokens=TokenRange(4, 4)))
    notice = world.notice()
    assert (notice.outcome, notice.extents, notice.stats.bytes) == (WriterOutcome.DELIVERED, (), 0)


def test_cancel_before_the_post_never_starts(world: World):
    world.load()
    world.rank.handle(world.order())
    world.rank.handle(world.order(OTHER))
    world.rank.handle(CancelWrite(KEY))
    first, second = world.notices()
    assert (first.key, first.outcome) == (KEY, WriterOutcome.NEVER_STARTED)
    assert (second.key, second.outcome) == (OTHER, WriterOutcome.DELIVERED)


def test_cancel_after_the_post_waits_for_the_write(world: World):
    world.load()
    world.agent.hold = True
    world.rank.handle(world.order())
    world.rank.poll()
    world.rank.handle(CancelWrite(KEY))
    assert world.notices(polls=20) == []
    assert world.rank.open_writes == 1
    world.fabric.land()
    assert world.notice().outcome is WriterOutcome.DELIVERED


def test_a_failed_write_is_quiesced_with_the_reason_and_no_extents(world: World):
    world.load()
    world.agent.fail_next("cable")
    world.rank.handle(world.order())
    notice = world.notice()
    assert (notice.outcome, notice.reason, notice.extents) == (WriterOutcome.QUIESCED, "cable", ())
    assert notice.stats.bytes == 0


def test_a_lost_peer_is_connected_again_by_the_next_load(world: World):
    world.load()
    world.agent.hold = True
    world.rank.handle(world.order())
    world.rank.poll()
    world.peer_agent.die()
    world.fabric.land()
    assert world.notice().outcome is WriterOutcome.QUIESCED
    world.agent.hold = False
    assert world.load().incompatibilities != ()
    world.fabric.add(world.peer_agent)
    assert world.load().incompatibilities == ()
    world.rank.handle(world.order(OTHER))
    assert world.notice().outcome is WriterOutcome.DELIVERED


def test_a_repeated_order_is_written_once(world: World):
    world.load()
    world.agent.delay_polls = 3
    world.rank.handle(world.order())
    world.rank.poll()
    world.rank.handle(world.order())
    assert len(world.notices(polls=10)) == 1


def test_forget_ends_what_is_queued_and_waits_for_what_is_open(world: World):
    world.load()
    world.agent.hold = True
    world.rank.handle(world.order())
    world.rank.poll()
    world.rank.handle(world.order(OTHER))
    world.rank.handle(ForgetPeer(world.peer.instance_id, world.peer.incarnation))
    (never,) = world.notices()
    assert (never.key, never.outcome) == (OTHER, WriterOutcome.NEVER_STARTED)
    world.fabric.land()
    assert world.notice().outcome is WriterOutcome.DELIVERED
    world.rank.handle(world.order())
    assert world.notice().outcome is WriterOutcome.NEVER_STARTED
    world.rank.close()


def test_writes_are_posted_one_at_a_time(world: World):
    world.load()
    world.agent.hold = True
    for offset in range(3):
        world.rank.handle(world.order(RequestKey((1 << 40) + offset)))
    for posted in (1, 2, 3):
        assert world.rank.poll()
        assert world.fabric.in_flight == posted


# --- the thread ------------------------------------------------------------------------------------------------------


class Hub:
    """The hub's end of a rank socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        ours.settimeout(20)
        self.frames = FrameSocket(ours)
        ours.settimeout(20)
        self.pending: list[RankToHub] = []

    def send(self, *commands) -> None:
        self.frames.send(wire.rank_input_to_bytes(commands))

    def recv(self) -> RankToHub:
        while not self.pending:
            frame = self.frames.recv()
            assert frame is not None
            self.pending.extend(wire.rank_output_from_bytes(frame))
        return self.pending.pop(0)


def start(hub: Hub, world: World, make=None, rank: int = 0, ended=None) -> AgentThread:
    agent = LoopbackAgent("thread", world.fabric)
    agent.delay_polls = 3
    return AgentThread(hub.theirs, make or (lambda: agent), world.src.page_table(), rank, Topology(), on_exit=ended)


def test_thread_serves_orders_until_the_hub_leaves(world: World):
    hub, ended = Hub(), []
    thread = start(hub, world, ended=ended.append)
    info = thread.start(20)
    assert hub.recv() == RankReady(info)
    hub.send(LoadPeer(world.peer))
    assert isinstance(hub.recv(), PeerLoaded)
    keys = [RequestKey((1 << 40) + i) for i in range(20)]
    hub.send(*(world.order(key) for key in keys))
    notices = [hub.recv() for _ in keys]
    assert [notice.key for notice in notices if isinstance(notice, TransferNotice)] == keys
    hub.frames.close()
    assert thread.join(20)
    assert thread.failure is None
    assert ended == [None]


def test_thread_can_be_stopped(world: World):
    hub = Hub()
    thread = start(hub, world)
    thread.start(20)
    thread.stop()
    assert thread.join(20)
    assert thread.failure is None
    thread.stop()


def test_a_failing_agent_surfaces_where_the_thread_was_started(world: World):
    def fail():
        raise AgentUnavailable("no NIXL here")

    thread = start(Hub(), world, make=fail)
    with pytest.raises(AgentUnavailable, match="no NIXL here"):
        thread.start(20)
    assert thread.join(20)


def test_a_wrong_rank_surfaces_where_the_thread_was_started(world: World):
    with pytest.raises(GeometryError, match="flat rank 0"):
        start(Hub(), world, rank=1).start(20)


def test_a_broken_agent_ends_the_thread_with_the_reason(world: World):
    class Broken(LoopbackAgent):
        def poll(self, handle) -> WriteStatus:
            if super().poll(handle).state is WriteState.DONE:
                raise AgentBroken("lost track")
            return WriteStatus(WriteState.IN_FLIGHT)

    hub, ended = Hub(), []
    thread = start(hub, world, make=lambda: Broken("broken", world.fabric), ended=ended.append)
    thread.start(20)
    hub.recv()
    hub.send(LoadPeer(world.peer), world.order())
    assert isinstance(hub.recv(), PeerLoaded)
    assert thread.join(20)
    assert isinstance(thread.failure, AgentBroken)
    assert ended == [thread.failure]
    assert hub.frames.recv() is None


def test_malformed_frames_end_the_thread_with_the_reason(world: World):
    hub = Hub()
    thread = start(hub, world)
    thread.start(20)
    hub.frames.send(b"\xff\xff")
    assert thread.join(20)
    assert "rank_input" in str(thread.failure)
