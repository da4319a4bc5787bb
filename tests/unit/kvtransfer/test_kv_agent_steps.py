"""A post that blocks for long keeps nobody but the agent's own thread."""

from __future__ import annotations

import socket
import threading

import numpy as np

from isthmus_core.framing import FrameSocket
from kv_storage import Shape, Storage, instance
from kvtransfer import wire
from kvtransfer.agents.base import Operation
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.ports import LoadPeer, RankBlocks, RequestKey, TokenRange, TransferNotice, WriteOrder, WriterOutcome
from kvtransfer.rank_info import RankInfo, Topology
from kvtransfer.transceiver.agent_thread import AgentThread

STEPS = 500


class SlowPost(LoopbackAgent):
    """A post that copies on the spot: it comes back when the test says so, and never holds the interpreter."""

    def __init__(self, fabric: LoopbackFabric) -> None:
        super().__init__("slow", fabric)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def submit(self, pairs, remote, operation=Operation.WRITE):
        self.inside.set()
        assert self.go_on.wait(30)
        return super().submit(pairs, remote, operation)


def test_the_executor_keeps_stepping_while_a_post_is_inside_the_agent():
    fabric = LoopbackFabric()
    src, dst = Storage(Shape(), "slot_major", 4), Storage(Shape(), "slot_major", 4)
    reader, agent = LoopbackAgent("reader", fabric), SlowPost(fabric)
    reader.register(dst.page_table().regions)
    peer = instance(RankInfo(0, Topology(), dst.page_table(), reader.descriptor()))
    ours, theirs = socket.socketpair()
    hub = FrameSocket(ours)
    thread = AgentThread(theirs, lambda: agent, src.page_table(), 0, Topology())
    thread.start(20)
    ids = (RankBlocks(0, 0, np.arange(4, dtype=np.int32)),)
    key, tokens = RequestKey(1 << 40), TokenRange(0, 16)
    order = WriteOrder(key, peer.instance_id, peer.incarnation, tokens, ids, ids)
    hub.send(wire.rank_input_to_bytes([LoadPeer(peer), order]))
    assert agent.inside.wait(20)
    # The post comes back only after the steps: an executor that waited for it would wait for ever.
    state = np.ones((32, 32))
    for _ in range(STEPS):
        state = np.tanh(state @ state)
    agent.go_on.set()
    events = []
    while not any(isinstance(event, TransferNotice) for event in events):
        frame = hub.recv()
        assert frame is not None
        events += wire.rank_output_from_bytes(frame)
    assert events[-1].outcome is WriterOutcome.DELIVERED
    hub.close()
    assert thread.join(20)
