"""The loopback agent's whole protocol, and every misbehaviour that it can be told."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.agents.base import Operation, WriteState
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.errors import AgentError, PeerLost
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.regions import RegionPairs


def region(memory: np.ndarray) -> RegisteredRegion:
    return RegisteredRegion(int(memory.ctypes.data), memory.nbytes, MemoryKind.DRAM)


def whole(src: np.ndarray, dst: np.ndarray) -> RegionPairs:
    src_at, dst_at, size = (np.array([value], np.int64) for value in (src.ctypes.data, dst.ctypes.data, src.nbytes))
    return RegionPairs(src_at, dst_at, size)


class Two:
    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.near, self.far = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
        self.a, self.b = LoopbackAgent("a", self.fabric), LoopbackAgent("b", self.fabric)
        self.a.register([region(self.near)])
        self.b.register([region(self.far)])
        self.a.load_remote(self.b.descriptor(), [region(self.far)])


def test_a_read_brings_the_remote_bytes_here():
    two = Two()
    two.far[:] = 9
    read = two.a.submit(whole(two.far, two.near), two.b.name, Operation.READ)
    assert two.a.poll(read).state is WriteState.DONE
    assert (two.near == 9).all()
    with pytest.raises(AgentError, match="registered region"):
        two.a.submit(whole(two.near, two.far), two.b.name, Operation.READ)


def test_messages_keep_their_order_and_name_their_sender():
    two = Two()
    two.a.notify(two.b.name, b"one")
    two.a.notify(two.b.name, b"two")
    assert two.b.notifications() == [(two.a.name, b"one"), (two.a.name, b"two")]
    assert two.b.notifications() == []
    with pytest.raises(AgentError, match="not been loaded"):
        two.b.notify(two.a.name, b"x")
    two.b.die()
    with pytest.raises(PeerLost):
        two.a.notify(two.b.name, b"three")


def test_memory_can_be_added_and_taken_back():
    two = Two()
    more = np.full(64, 3, np.uint8)
    with pytest.raises(AgentError, match="registered region"):
        two.a.submit(whole(more, two.far), two.b.name)
    two.a.register([region(more)])
    two.a.hold = True
    write = two.a.submit(whole(more, two.far), two.b.name)
    with pytest.raises(AgentError, match="open writes"):
        two.a.deregister([region(more)])
    two.fabric.land()
    two.a.release(write)
    two.a.deregister([region(more)])
    with pytest.raises(AgentError, match="not registered these"):
        two.a.deregister([region(more)])
    with pytest.raises(AgentError, match="registered region"):
        two.a.submit(whole(more, two.far), two.b.name)


@pytest.mark.parametrize("kind", [MemoryKind.VRAM, MemoryKind.FILE, MemoryKind.OBJECT, MemoryKind.BLOCK])
def test_other_memory_is_refused_by_name(kind):
    with pytest.raises(AgentError, match=rf"can not register {kind.name} memory here, only DRAM"):
        LoopbackAgent("a", LoopbackFabric()).register([RegisteredRegion(4096, 64, kind)])


def test_remote_memory_is_known_only_where_it_was_loaded():
    two = Two()
    assert two.a.check_remote(two.b.name)
    assert two.a.check_remote(two.b.name, [region(two.far)])
    assert two.a.check_remote(two.b.name, [region(two.far[8:16])])
    assert not two.a.check_remote(two.b.name, [region(two.near)])
    assert not two.a.check_remote("nobody")


def test_writes_land_in_another_order():
    two = Two()
    two.a.hold = True
    ones, twos = np.full(64, 1, np.uint8), np.full(64, 2, np.uint8)
    two.a.register([region(ones), region(twos)])
    first, second = (two.a.submit(whole(memory, two.far), two.b.name) for memory in (ones, twos))
    assert two.fabric.land([1]) == 1
    assert (two.far == 2).all()
    assert two.a.poll(first).state is WriteState.IN_FLIGHT
    assert two.a.poll(second).state is WriteState.DONE
    assert two.fabric.land() == 1
    assert (two.far == 1).all()
    for order in ([0], [0, 0]):
        with pytest.raises(AgentError, match="order"):
            two.fabric.land(order)


@pytest.mark.parametrize("landed", [True, False])
def test_a_write_may_never_be_heard_of_again(landed):
    two = Two()
    two.a.lose_next(landed=landed)
    write = two.a.submit(whole(two.near, two.far), two.b.name)
    for _ in range(5):
        assert two.a.poll(write).state is WriteState.IN_FLIGHT
    assert bool((two.far == two.near).all()) is landed
    with pytest.raises(AgentError, match="not over"):
        two.a.release(write)
    assert two.a.poll(two.a.submit(whole(two.near, two.far), two.b.name)).state is WriteState.DONE
