"""Two ranks in two processes over the real NIXL agent: real bytes, and a peer that dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from isthmus_core.framing import FrameSocket
from kv_storage import GUARD, Shape, Storage, instance
from kvtransfer import wire
from kvtransfer.ports import (
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
from kvtransfer.rank_info import InstanceInfo

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed"),
]
SUPPORT = Path(__file__).parents[1] / "support"
KEY = RequestKey(1 << 40)


class Rank:
    """A rank process and the hub's ends of its sockets."""

    def __init__(self, layout: str, blocks: int, unit: int = 4, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        private, their_private = socket.socketpair()
        self.storage_args = (Shape(unit=unit), layout, blocks)
        command = [sys.executable, str(SUPPORT / "nixl_rank.py"), str(theirs.fileno()), layout, str(blocks), str(unit)]
        with theirs, their_private:
            self.process = subprocess.Popen(
                [*command, str(their_private.fileno())],
                pass_fds=(theirs.fileno(), their_private.fileno()),
                env={**os.environ, "UCX_MODULES": "^ib", "OMP_NUM_THREADS": "1", **environment},
                stderr=subprocess.PIPE,
            )
        self.hub, self.private = FrameSocket(ours), FrameSocket(private)
        self.pending: list[RankToHub] = []

    def send(self, *commands) -> None:
        self.hub.send(wire.rank_input_to_bytes(commands))

    def recv(self) -> RankToHub | None:
        while not self.pending:
            frame = self.hub.recv()
            if frame is None:
                return None
            self.pending.extend(wire.rank_output_from_bytes(frame))
        return self.pending.pop(0)

    def info(self) -> InstanceInfo:
        ready = self.recv()
        assert isinstance(ready, RankReady), self.process.communicate()
        return instance(ready.info)

    def ask(self, command: str) -> bytes:
        self.private.send(command.encode())
        answer = self.private.recv()
        assert answer is not None
        return answer

    def close(self) -> int:
        self.hub.close()
        self.private.close()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stderr:
                self.process.stderr.close()


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*args, **kwargs) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


def order(peer: InstanceInfo, src, dst, key: RequestKey = KEY) -> WriteOrder:
    return WriteOrder(
        key,
        peer.instance_id,
        peer.incarnation,
        TokenRange(0, 4 * len(dst)),
        (RankBlocks(0, 0, np.array(src, np.int32)),),
        (RankBlocks(0, 0, np.array(dst, np.int32)),),
    )


def load(writer: Rank, peer: InstanceInfo) -> PeerLoaded:
    writer.send(LoadPeer(peer))
    loaded = writer.recv()
    assert isinstance(loaded, PeerLoaded)
    return loaded


def notice_of(rank: Rank) -> TransferNotice:
    notice = rank.recv()
    assert isinstance(notice, TransferNotice)
    return notice


@pytest.mark.parametrize(
    ("layouts", "environment"),
    [
        (("slot_major", "slot_major"), {}),
        (("slot_major", "layer_major"), {}),
        (("layer_major", "slot_major"), {"UCX_TLS": "tcp,self"}),
    ],
)
def test_real_bytes_between_processes(ranks, layouts, environment):
    writer, reader = ranks(layouts[0], 8, **environment), ranks(layouts[1], 8, **environment)
    writer.info()
    peer = reader.info()
    assert load(writer, peer).incompatibilities == ()
    source = np.frombuffer(writer.ask("fill 8"), np.uint8)
    src, dst = [3, 4, 0], [6, 7, 2]
    writer.send(order(peer, src, dst))
    notice = notice_of(writer)
    assert notice.outcome is WriterOutcome.DELIVERED, notice.reason
    assert notice.stats.path.startswith("nixl/ucx")
    if environment:
        assert "tcp" in notice.stats.path
        assert "cma" not in notice.stats.path
    want = np.full(len(source), 0xEE, np.uint8)
    a_side, b_side = Storage(*writer.storage_args), Storage(*reader.storage_args)
    size = a_side.shape.buffer
    for one, two in zip(src, dst, strict=True):
        for layer in range(3):
            for kv in (0, 1):
                a, b = GUARD + a_side.where(layer, kv, one), GUARD + b_side.where(layer, kv, two)
                want[b : b + size] = source[a : a + size]
    np.testing.assert_array_equal(np.frombuffer(reader.ask("dump"), np.uint8), want)
    assert (writer.close(), reader.close()) == (0, 0)


def test_a_peer_killed_before_it_is_loaded_is_refused_with_the_reason(ranks):
    writer, reader = ranks("slot_major", 4), ranks("slot_major", 4)
    writer.info()
    peer = reader.info()
    reader.process.send_signal(signal.SIGKILL)
    reader.process.wait(20)
    (reason,) = load(writer, peer).incompatibilities
    assert "can not be reached" in reason.yours
    writer.send(order(peer, [0], [0]))
    assert notice_of(writer).outcome is WriterOutcome.NEVER_STARTED
    assert writer.close() == 0


def test_a_peer_killed_before_the_write_quiesces_it(ranks):
    writer, reader = ranks("slot_major", 4), ranks("slot_major", 4)
    writer.info()
    peer = reader.info()
    assert load(writer, peer).incompatibilities == ()
    reader.process.send_signal(signal.SIGKILL)
    reader.process.wait(20)
    writer.send(order(peer, [0], [0]))
    notice = notice_of(writer)
    assert notice.outcome is not WriterOutcome.DELIVERED
    assert notice.reason
    assert notice.extents == ()
    # The writer itself is well: it serves the next peer.
    other = ranks("slot_major", 4)
    info = other.info()
    assert load(writer, info).incompatibilities == ()
    writer.send(order(info, [0], [0], RequestKey(KEY.request_id + 1)))
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED
    assert writer.close() == 0


@pytest.mark.parametrize("environment", [{}, {"UCX_TLS": "tcp,self"}])
def test_a_peer_killed_in_the_middle_ends_in_a_notice(ranks, environment):
    # 512 blocks of 3 layers, K and V: 200 MB, long enough to die in.
    writer, reader = (ranks("slot_major", 512, 1 << 13, **environment) for _ in range(2))
    writer.info()
    peer = reader.info()
    assert load(writer, peer).incompatibilities == ()
    turned = list(range(511, -1, -1))
    keys = [RequestKey(KEY.request_id + i) for i in range(16)]
    writer.send(*(order(peer, range(512), turned, key) for key in keys))
    # 3 GB take far longer than this; a machine slow enough not to have begun sees the peer gone all the same.
    time.sleep(0.1)
    reader.process.send_signal(signal.SIGKILL)
    reader.process.wait(20)
    notices = [notice_of(writer) for _ in keys]
    assert sorted(one.key for one in notices) == keys
    assert notices[-1].outcome is not WriterOutcome.DELIVERED
    assert all(one.outcome is WriterOutcome.DELIVERED or one.reason for one in notices)
    assert writer.close() == 0


def test_transports_that_can_not_work_are_named(ranks):
    rank = ranks("slot_major", 4, UCX_TLS="sm,self")
    assert rank.recv() is None
    _, errors = rank.process.communicate(timeout=20)
    assert b"UCX_TLS=sm,self" in errors
    assert b"add tcp" in errors
