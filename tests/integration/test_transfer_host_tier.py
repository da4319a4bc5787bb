"""Caches in different kinds of memory: every write goes from host memory to host memory, and the bytes are right.

"Device" memory here is host memory that a rank calls VRAM; the agent refuses to write across, as no real one does.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hub_world import Side, assert_hubs_idle, connect, key, until
from kv_storage import Shape
from kvtransfer.agents.base import Operation
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric, LoopbackWrite
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.errors import AgentError
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.ports import ReceiveOutcome, TransferFailure
from kvtransfer.rank_info import InstanceRole
from kvtransfer.transceiver.probing import ProbePolicy, host_scratch

if TYPE_CHECKING:
    from kvtransfer.regions import RegionPairs

pytestmark = pytest.mark.integration

UNIT = 64
DRAM, VRAM = MemoryKind.DRAM, MemoryKind.VRAM


class KindsAgent(LoopbackAgent):
    """Knows two kinds of memory and writes inside one of them only."""

    memory_kinds = frozenset({DRAM, VRAM})
    across = 0

    def submit(self, pairs: RegionPairs, remote: str, operation: Operation = Operation.WRITE) -> LoopbackWrite:
        assert self._regions is not None
        near, _ = self._regions.devices(pairs.src, pairs.lengths)
        far, _ = self._known(remote).devices(pairs.dst, pairs.lengths)
        if near is not far:
            self.across += 1
            raise AgentError(f"written across, from {near.name} to {far.name}")
        return super().submit(pairs, remote, operation)


class Tier:
    """A context and a generation instance with caches in these kinds of memory. `arenas`: on the host, where the cache
    is not."""

    def __init__(
        self, context: MemoryKind, generation: MemoryKind, policy: StagingPolicy, *, arenas: bool, problem: str = ""
    ) -> None:
        fabric, self.keep, self.received = LoopbackFabric(), list[object](), list[ReceiveOutcome]()
        self.locks = 0

        def lock() -> str:
            self.locks += 1
            return problem

        common = {"lock_host": lock, "staging": policy, "unit_bytes": UNIT, "chunk_bytes": 256, "max_peers": 2}
        self.sides = [
            Side(
                name,
                role,
                fabric,
                shape=Shape(unit=16),
                layout=layout,
                kind=kind,
                agent=KindsAgent(name, fabric),
                probing=ProbePolicy(self._take(8192, kind), host_scratch=self._beside(kind, 8192)),
                bouncing=BouncePolicy(
                    **{end: self._take(1024, kind), f"host_{end}": self._beside(kind, 1024) if arenas else None},  # pyright: ignore[reportArgumentType]
                    **common,  # pyright: ignore[reportArgumentType]
                ),
                bounce_unit_bytes=UNIT,
                max_peers=2,
                timeout_s=5,
                drain_s=0.1,
            )
            for name, role, kind, end, layout in (
                ("c", InstanceRole.CONTEXT, context, "send", "slot_major"),
                ("g", InstanceRole.GENERATION, generation, "receive", "layer_major"),
            )
        ]
        self.c, self.g = self.sides

    @property
    def across(self) -> int:
        """Writes that were refused."""
        return sum(one.agent.across for one in self.sides if isinstance(one.agent, KindsAgent))

    def _take(self, nbytes: int, kind: MemoryKind) -> RegisteredRegion:
        region, keep = host_scratch(nbytes)
        self.keep.append(keep)
        return replace(region, memory_kind=kind)

    def _beside(self, kind: MemoryKind, nbytes: int) -> RegisteredRegion | None:
        return self._take(nbytes, DRAM) if kind is VRAM else None

    async def __aenter__(self) -> Tier:
        for side in self.sides:
            await side.start()
        await connect(self.g, self.c)
        return self

    async def __aexit__(self, *_: object) -> None:
        for side in reversed(self.sides):
            await side.stop()

    async def move(self, number: int) -> ReceiveOutcome:
        """Blocks 3, 7, 1 to 9, 0, 12."""
        self.c.offer(key(number), 3, 7, 1, seed=number)
        self.g.ask(key(number), self.c.holder, 9, 0, 12)

        def settled() -> bool:
            self.received += self.g.scheduler.check_gen_transfer_status()
            return any(one.key == key(number) and one.settled for one in self.received)

        await until(settled)
        return next(one for one in self.received if one.key == key(number) and one.settled)


@pytest.fixture(autouse=True)
def no_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no device whose allocator could be asked."""
    monkeypatch.setattr("kvtransfer.transceiver.probing.unshareable", lambda _regions: ())  # pyright: ignore


@pytest.mark.parametrize("policy", [StagingPolicy.COST, StagingPolicy.BLOCKS_96])
@pytest.mark.parametrize(("context", "generation"), [(VRAM, DRAM), (DRAM, VRAM), (VRAM, VRAM)])
async def test_bytes_go_through_host_memory_on_both_sides_where_the_kinds_differ(
    context: MemoryKind, generation: MemoryKind, policy: StagingPolicy
):
    async with Tier(context, generation, policy, arenas=True) as tier:
        for number in (1, 2):
            outcome = await tier.move(number)
            assert outcome.failure is TransferFailure.NONE, outcome.reason
            assert tier.g.block_bytes(9, 0, 12) == tier.c.block_bytes(3, 7, 1)
            assert outcome.stats is not None
            why, across = outcome.stats.writers.why, f"from a cache in {context.name} to one in {generation.name}"
            assert why.startswith("bounced: " + across) == (context is not generation)
        assert tier.across == 0
        assert bool(tier.locks) == (context is not generation)
        await tier.c.hub.drain(10)
        await tier.g.hub.drain(10)
        assert_hubs_idle(tier.sides)
        assert tier.g.hub.core.chunks_in.is_idle
        assert tier.g.hub.core.chunks_in.granted_bytes(0) == 0


@pytest.mark.parametrize(("context", "generation"), [(VRAM, DRAM), (DRAM, VRAM), (VRAM, VRAM)])
async def test_memory_that_can_not_be_locked_stops_only_what_needs_it(context: MemoryKind, generation: MemoryKind):
    async with Tier(context, generation, StagingPolicy.COST, arenas=True, problem="CUDA locks nothing") as tier:
        outcome = await tier.move(1)
        same = context is generation
        assert (outcome.failure is TransferFailure.NONE) == same, outcome.reason
        assert bool(tier.locks) == (not same)


@pytest.mark.parametrize(("arenas", "policy"), [(False, StagingPolicy.COST), (True, StagingPolicy.NEVER)])
async def test_a_write_across_is_never_silent(caplog: pytest.LogCaptureFixture, arenas: bool, policy: StagingPolicy):
    async with Tier(VRAM, DRAM, policy, arenas=arenas) as tier:
        with caplog.at_level(logging.WARNING, "kvtransfer.transceiver.choosing"):
            outcome = await tier.move(1)
        assert outcome.failure is not TransferFailure.NONE
        assert "from a cache in VRAM to one in DRAM goes no fast way" in caplog.text
