"""Two ranks in two processes over the real NIXL agent: real bytes, and a peer that dies."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from kv_storage import GUARD, Storage
from kvtransfer.ports import RequestKey, WriterOutcome
from rank_process import KEY, Rank, load, needs_nixl, notice_of, order

pytestmark = [pytest.mark.integration, needs_nixl]


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*args, **kwargs) -> Rank:
        made.append(Rank(*args, **kwargs))
        return made[-1]

    yield make
    for rank in made:
        rank.close()


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
