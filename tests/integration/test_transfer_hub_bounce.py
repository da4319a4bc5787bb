"""Hand-offs through chunks between real hubs: the bytes arrive, room comes back, and nothing is decoded too early."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from hub_world import Side, assert_hubs_idle, connect, key, until
from kv_storage import Shape
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.bounce.copying import Copy, HostCopier
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.errors import ArenaError
from kvtransfer.packed import Packed
from kvtransfer.ports import ReceiveOutcome, TransferFailure
from kvtransfer.rank_info import InstanceRole
from kvtransfer.transceiver.probing import host_scratch

pytestmark = pytest.mark.integration

UNIT = 64
SHAPE = Shape(unit=16)


class HeldCopier(HostCopier):
    """Copies at once and says so when it is told to."""

    def __init__(self) -> None:
        self.held, self.begun, self.prepared = False, 0, 0

    def prepare(self, packed: Packed) -> None:
        assert packed.nbytes > 0
        self.prepared += not self.begun

    def scatter(self, packed: Packed, begin: int, end: int, chunk: int) -> Copy:
        self.begun += 1
        super().scatter(packed, begin, end, chunk)
        return self

    def done(self) -> bool:
        return not self.held

    def seconds(self, noticed: float) -> float:
        return noticed


class Pair:
    """A context and a generation instance that bounce everything."""

    def __init__(self, *, send: int = 1024, receive: int = 1024, peers: int = 2, **shapes: Shape) -> None:
        fabric = LoopbackFabric()
        self.fabric, self.received = fabric, list[ReceiveOutcome]()
        self.keep = [host_scratch(send), host_scratch(receive)]
        self.scatters = HeldCopier()
        (near, _), (far, _) = self.keep
        common = {"staging": StagingPolicy.ALWAYS, "unit_bytes": UNIT, "chunk_bytes": 256, "max_peers": peers}
        self.c = Side(
            "c",
            InstanceRole.CONTEXT,
            fabric,
            shape=shapes.get("c", SHAPE),
            bouncing=BouncePolicy(send=near, **common),  # pyright: ignore[reportArgumentType]
        )
        self.g = Side(
            "g",
            InstanceRole.GENERATION,
            fabric,
            shape=shapes.get("g", SHAPE),
            layout="layer_major",
            bouncing=BouncePolicy(receive=far, copier=self.scatters, **common),  # pyright: ignore[reportArgumentType]
            bounce_unit_bytes=UNIT,
            max_peers=peers,
            timeout_s=5,
            drain_s=0.1,
        )

    async def __aenter__(self) -> Pair:
        await self.c.start()
        await self.g.start()
        await connect(self.g, self.c)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.g.stop()
        await self.c.stop()

    async def outcome(self, number: int) -> ReceiveOutcome:
        """The settled outcome of a request."""
        mine: list[ReceiveOutcome] = []

        def poll() -> bool:
            self.received += self.g.scheduler.check_gen_transfer_status()
            mine[:] = [one for one in self.received if one.key == key(number) and one.settled]
            return bool(mine)

        await until(poll)
        return mine[0]

    async def idle(self) -> None:
        await self.c.hub.drain(10)
        await self.g.hub.drain(10)
        assert_hubs_idle([self.c, self.g])
        assert self.g.hub.core.chunks_in.is_idle
        assert self.g.hub.core.chunks_in.granted_bytes(0) == 0


async def test_chunks_arrive_byte_for_byte_and_room_comes_back():
    async with Pair() as pair:
        pair.c.offer(key(1), 3, 7, 1)
        pair.g.ask(key(1), pair.c.holder, 9, 0, 12)
        outcome = await pair.outcome(1)
        assert outcome.failure is TransferFailure.NONE
        assert pair.g.block_bytes(9, 0, 12) == pair.c.block_bytes(3, 7, 1)
        assert outcome.stats is not None
        assert outcome.stats.writers.bounced == outcome.stats.writers.bytes == 3 * pair.c.storage.slot
        assert pair.scatters.begun > 3
        assert outcome.stats.writers.gather > 0
        assert outcome.stats.writers.scatter > 0
        assert outcome.stats.writers.why == "bounced: transfer.staging_policy = always"
        await pair.idle()
    # What is scattered was planned before the first chunk had come.
    assert pair.scatters.prepared
    assert pair.scatters.begun


async def test_a_profiler_sees_every_part_of_a_write_as_a_closed_range(monkeypatch: pytest.MonkeyPatch):
    """Under a torch whose NVTX is a list."""
    seen: list[tuple[str, str]] = []

    @contextmanager
    def drawn(name: str) -> Generator[None]:
        seen.append(("open", name))
        yield
        seen.append(("close", name))

    def write() -> set[str]:
        names = [name for what, name in seen if what == "open"]
        assert sorted(names) == sorted(name for what, name in seen if what == "close")
        seen.clear()
        return set(names)

    fake = SimpleNamespace(cuda=SimpleNamespace(nvtx=SimpleNamespace(range=drawn)))
    monkeypatch.setitem(sys.modules, "torch", cast("ModuleType", fake))
    async with Pair() as pair:
        for number in (1, 2):
            pair.c.offer(key(number), 3, 7, 1)
            pair.g.ask(key(number), pair.c.holder, 9, 0, 12)
            assert (await pair.outcome(number)).failure is TransferFailure.NONE
            # Nothing is drawn before a profiler is attached.
            assert write() == (set() if number == 1 else {"kv.plan", "kv.gather", "kv.post", "kv.scatter"})
            monkeypatch.setattr("kvtransfer.nvtx._ATTACHED", True)


async def test_many_at_once_through_an_arena_that_holds_two_chunks():
    async with Pair(send=2 * UNIT, receive=2 * UNIT) as pair:
        for i in range(8):
            pair.c.offer(key(i), 2 * i, 2 * i + 1, seed=i)
            pair.g.ask(key(i), pair.c.holder, 63 - 2 * i, 62 - 2 * i)
        for i in range(8):
            assert (await pair.outcome(i)).failure is TransferFailure.NONE
            assert pair.g.block_bytes(63 - 2 * i, 62 - 2 * i) == pair.c.block_bytes(2 * i, 2 * i + 1)
        await pair.idle()


async def test_nothing_is_complete_before_its_last_scatter():
    async with Pair() as pair:
        pair.scatters.held = True
        pair.c.offer(key(1), 3)
        pair.g.ask(key(1), pair.c.holder, 9)
        await until(lambda: pair.scatters.begun)
        await until(lambda: pair.c.hub.sessions() == [])
        assert pair.g.scheduler.check_gen_transfer_status() == []
        pair.scatters.held = False
        assert (await pair.outcome(1)).failure is TransferFailure.NONE
        await pair.idle()


async def test_pages_of_a_dead_writer_are_not_free_while_they_are_scattered_into():
    async with Pair() as pair:
        pair.scatters.held = True
        pair.c.agent.delay_polls = 1
        pair.c.offer(key(1), 3, 4)
        pair.g.ask(key(1), pair.c.holder, 9, 10)
        await until(lambda: pair.scatters.begun)
        pair.c.kill_rank()
        await until(lambda: pair.g.hub.core.chunks_in.waiting)
        pair.received += pair.g.scheduler.check_gen_transfer_status()
        assert not any(one.settled for one in pair.received)
        pair.scatters.held = False
        assert (await pair.outcome(1)).failure is not TransferFailure.NONE
        assert pair.g.hub.core.chunks_in.granted_bytes(0) == 0


async def test_a_cancel_between_chunks_ends_both_sides():
    async with Pair(send=2 * UNIT, receive=2 * UNIT) as pair:
        pair.c.agent.hold = True
        pair.c.offer(key(1), 3, 4)
        pair.g.ask(key(1), pair.c.holder, 9, 10)
        await until(lambda: pair.fabric.in_flight)
        assert pair.g.scheduler.cancel_request(key(1)) is False
        await until(lambda: [view.state for view in pair.c.hub.sessions()] == ["cancelling"])
        assert pair.g.hub.core.chunks_in.granted_bytes(0) > 0
        pair.c.agent.hold = False
        pair.fabric.land()
        assert (await pair.outcome(1)).failure is TransferFailure.CANCELLED
        await pair.idle()


async def test_what_bounces_goes_on_when_its_stream_is_back():
    async with Pair(send=2 * UNIT, receive=2 * UNIT) as pair:
        pair.c.agent.hold = True
        pair.c.offer(key(1), 3, 4)
        pair.g.ask(key(1), pair.c.holder, 9, 10)
        await until(lambda: pair.fabric.in_flight)
        await pair.c.sever()
        # The next chunk is asked for while nobody can be asked.
        pair.c.agent.hold = False
        pair.fabric.land()
        await until(lambda: not pair.fabric.in_flight)
        await asyncio.sleep(0.05)
        assert pair.c.rank.open_writes == 1
        assert not pair.received
        await pair.c.restore()
        assert (await pair.outcome(1)).failure is TransferFailure.NONE
        assert pair.g.block_bytes(9, 10) == pair.c.block_bytes(3, 4)
        await pair.idle()


def test_an_arena_that_is_too_small_is_refused_with_the_least_size():
    region, _ = host_scratch(4 * UNIT - 1)
    with pytest.raises(ArenaError, match=f"the least is {4 * UNIT} bytes"):
        BouncePolicy(receive=region, unit_bytes=UNIT, chunk_bytes=256, max_peers=4)
