"""One transfer through chunks on the context rank: in which order it takes room, asks, gathers and writes."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest

from bounce_case import BounceCase
from isthmus_core.keys import RequestKey
from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.bounce.copying import HostCopier
from kvtransfer.bounce_ports import BounceChunk, ChunkName, ChunkReady, Grant
from kvtransfer.ports import TokenRange
from kvtransfer.regions import RegionPairs
from kvtransfer.transceiver.bounced_write import BouncedWrite, Route
from kvtransfer.transceiver.parts import equal_parts

KEY = RequestKey(1 << 40)
WINDOW = TokenRange(0, 21)


class Agent:
    """Copies at the second look."""

    def __init__(self) -> None:
        self.posted: list[RegionPairs] = []
        self.looks: dict[int, int] = {}

    def submit(self, pairs: RegionPairs, _: str) -> int:
        self.posted.append(pairs)
        return len(self.posted) - 1

    def poll(self, handle: int) -> WriteStatus:
        self.looks[handle] = self.looks.get(handle, 0) + 1
        if self.looks[handle] < 2:
            return WriteStatus(WriteState.IN_FLIGHT)
        pairs = self.posted[handle]
        ctypes.memmove(int(pairs.dst[0]), int(pairs.src[0]), int(pairs.lengths[0]))
        return WriteStatus(WriteState.DONE)

    def release(self, handle: int) -> None:
        assert self.looks[handle] >= 2


class Room:
    """Of the send arena: as much as a test gives. `spare`: it is there before the peer is asked."""

    def __init__(self, size: int, *, spare: bool) -> None:
        self.size, self.spare = size, spare
        self.wanted: dict[ChunkName, int] = {}
        self.kept: list[ChunkName] = []
        self.freed: list[ChunkName] = []

    def now(self, _: BouncedWrite, name: ChunkName, nbytes: int) -> int | None:
        assert 0 < nbytes <= self.size
        return (name.seq - 1) % 3 * self.size if self.spare else None

    def keep(self, name: ChunkName) -> None:
        self.kept.append(name)

    def ask(self, name: ChunkName, nbytes: int) -> None:
        self.wanted[name] = nbytes

    def free(self, name: ChunkName) -> None:
        self.wanted.pop(name, None)
        self.freed.append(name)


class World:
    """A write of a case in `count` chunks, with both arenas."""

    def __init__(self, count: int, depth: int = 2, *, spare: bool = True) -> None:
        self.case, self.agent = BounceCase("larger blocks"), Agent()
        self.size = self.case.source.nbytes
        self.room = Room(self.size, spare=spare)
        self.near, self.far = np.zeros(3 * self.size, np.uint8), np.zeros(self.size, np.uint8)
        self.said: list[ChunkReady | BounceChunk] = []
        near, far = (int(one.ctypes.data) for one in (self.near, self.far))
        self.write = BouncedWrite(
            self.agent,  # pyright: ignore[reportArgumentType]
            HostCopier(),
            self.case.source,
            Route(KEY, 1, 0, 0, "g", near, far, WINDOW, (0,)),
            equal_parts(self.size, -(-self.size // count)),
            depth,
            say=self.said.append,
            room=self.room,  # pyright: ignore[reportArgumentType]
            number=itertools.count(1).__next__,
            clock=lambda: 0.0,
        )

    def asked(self) -> list[ChunkReady]:
        return [one for one in self.said if isinstance(one, ChunkReady)]

    def give(self, most: int = 1 << 30) -> None:
        """Room here for everything that waits for it."""
        for name, nbytes in list(self.room.wanted.items()):
            del self.room.wanted[name]
            self.write.place(name, 0, min(nbytes, most))


def test_what_has_room_to_spare_is_gathered_while_the_peer_is_asked():
    world = World(1)
    world.write.post()
    (ready,) = world.asked()
    assert (ready.nbytes, ready.window, ready.layer_groups) == (world.size, WINDOW, (0,))
    assert not world.near.any()
    world.write.look()
    assert world.near.any()
    world.write.look()
    assert not world.agent.posted
    assert not world.room.kept
    world.write.granted(Grant(ready.name, 0, world.size))
    assert world.room.kept == [ready.name]
    states = [world.write.look().state for _ in range(3)]
    assert states == [WriteState.IN_FLIGHT, WriteState.IN_FLIGHT, WriteState.DONE]
    assert world.room.freed == [ready.name]
    told = world.said[-1]
    assert isinstance(told, BounceChunk)
    assert (told.begin, told.end, told.window) == (0, world.size, WINDOW)
    assert (world.far == world.near[: world.size]).all()


def test_what_has_none_takes_room_when_the_peer_has_granted_some():
    world = World(1, spare=False)
    world.write.post()
    (ready,) = world.asked()
    world.write.look()
    assert not world.room.wanted
    world.write.granted(Grant(ready.name, 0, world.size))
    assert world.room.wanted == {ready.name: world.size}
    world.write.look()
    assert not world.near.any()
    world.give()
    states = [world.write.look().state for _ in range(4)]
    assert states[-1] is WriteState.DONE
    assert not world.room.kept
    assert (world.far == world.near[: world.size]).all()


@pytest.mark.parametrize("spare", [True, False])
def test_where_there_is_less_room_the_rest_is_asked_for_again(*, spare: bool):
    world = World(1, spare=spare)
    world.write.post()
    for _ in range(400):
        for ready in world.asked():
            world.write.granted(Grant(ready.name, 0, 150))
        world.give(most=100)
        if world.write.look().state is WriteState.DONE:
            break
    extents = [(one.begin, one.end) for one in world.said if isinstance(one, BounceChunk)]
    covered = sorted(extents)
    assert (covered[0][0], covered[-1][1]) == (0, world.size)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
    assert max(int(pairs.lengths[0]) for pairs in world.agent.posted) == (150 if spare else 100)
    assert len(world.room.freed) == len(extents)


def test_a_post_goes_before_the_next_gather():
    world = World(3, depth=3)
    third = -(-world.size // 3)
    world.write.post()
    for ready in world.asked():
        world.write.granted(Grant(ready.name, 0, ready.nbytes))
    world.write.look()
    assert (len(world.agent.posted), bool(world.near[:third].any())) == (0, True)
    world.write.look()
    assert len(world.agent.posted) == 1
    assert not world.near[third:].any()


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("when", ["while the peer is asked", "with a grant", "gathered"])
def test_a_cancel_gives_back_all_room(when: str, *, spare: bool):
    world = World(2, spare=spare)
    world.write.post()
    names = [one.name for one in world.asked()]
    holds = set(names) if spare else set[ChunkName]()
    if when != "while the peer is asked":
        world.write.granted(Grant(names[0], 0, world.size))
        holds.add(names[0])
    if when == "gathered":
        world.give()
        world.write.look()
    world.write.cancel("enough")
    assert world.write.look().state is WriteState.FAILED
    assert set(world.room.freed) == holds
    assert not world.agent.posted
    # What comes late finds nobody.
    world.write.granted(Grant(names[1], 0, 1))
    world.write.place(names[1], 0, 1)
    assert world.room.freed[-1] == names[1]
    assert not world.room.wanted
    assert world.write.look().state is WriteState.FAILED


@pytest.mark.parametrize("spare", [True, False])
def test_a_grant_of_nothing_ends_the_write(*, spare: bool):
    world = World(1, spare=spare)
    world.write.post()
    world.write.granted(Grant(world.asked()[0].name, 0, 0))
    status = world.write.look()
    assert (status.state, "no room" in status.reason) == (WriteState.FAILED, True)
    assert len(world.room.freed) == spare
