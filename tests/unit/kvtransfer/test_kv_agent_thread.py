"""The thread that owns the agent: serves its hub to the end, and says why it ended."""

from __future__ import annotations

import socket

import pytest

from isthmus_core.framing import FrameSocket
from kvtransfer import wire
from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.agents.loopback import LoopbackAgent
from kvtransfer.errors import AgentBroken, AgentUnavailable, GeometryError
from kvtransfer.ports import (
    LoadPeer,
    PeerLoaded,
    RankReady,
    RankToHub,
    RequestKey,
    TransferNotice,
)
from kvtransfer.rank_info import Topology
from kvtransfer.transceiver.agent_thread import AgentThread
from rank_world import World


@pytest.fixture
def world() -> World:
    return World()


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
