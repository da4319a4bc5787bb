"""Two instances in one process for tests of the hub: real hubs over gRPC on localhost, loopback agents underneath.

Each side has one rank; its thread is imitated by a task that handles commands and polls.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from isthmus.v1.kv_transfer_service_pb2_grpc import add_KvTransferServiceServicer_to_server

from isthmus_core.config import TelemetryConfig
from isthmus_core.process import free_port
from isthmus_core.rpc import RpcServer
from isthmus_core.tracing import TraceContext, Tracing
from kv_storage import GUARD, MODEL, Shape, Storage
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.config import TransferConfig
from kvtransfer.hub import PairEstimate, PairState, PairStatus, PeerAddress, TransferHub
from kvtransfer.pools import MemoryKind
from kvtransfer.ports import Holder, RankBlocks, RankToHub, ReceiveRequest, RequestKey, TokenRange
from kvtransfer.rank_info import InstanceRole, ModelFingerprint, Topology
from kvtransfer.transceiver.probing import ProbePolicy
from kvtransfer.transceiver.rank import RankTransceiver
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtransfer.bounce.policy import BouncePolicy
    from kvtransfer.control.negotiation import Dialect
    from kvtransfer.ports import HubToRank

TOKENS_PER_BLOCK = Shape().tokens_per_block
NO_TRACING = Tracing.from_config(TelemetryConfig(), "test")


def key(number: int, attempt: int = 0) -> RequestKey:
    """A global request id."""
    return RequestKey((1 << 40) + number, attempt)


def blocks(*ids: int, rank: int = 0, group: int = 0) -> tuple[RankBlocks, ...]:
    """One block list."""
    return (RankBlocks(rank, group, np.array(ids, np.int32)),)


@dataclass
class QueuePort:
    """RankPort of a rank in the same process."""

    queue: deque[HubToRank] = field(default_factory=lambda: deque["HubToRank"]())
    gone: bool = False

    def send(self, message: HubToRank) -> None:
        if self.gone:
            raise ConnectionError("the rank is gone")
        self.queue.append(message)


class Side:
    """One instance: storage, rank, hub, server, scheduler role."""

    def __init__(
        self,
        name: str,
        role: InstanceRole,
        fabric: LoopbackFabric,
        *,
        shape: Shape | None = None,
        layout: str = "slot_major",
        model: ModelFingerprint = MODEL,
        exited: tuple[bytes, ...] = (),
        dialect: Dialect | None = None,
        tracing: Tracing = NO_TRACING,
        total_blocks: int = 64,
        probing: ProbePolicy | None = None,
        bouncing: BouncePolicy | None = None,
        agent: LoopbackAgent | None = None,
        kind: MemoryKind = MemoryKind.DRAM,
        **settings: float | str,
    ) -> None:
        self.name, self.incarnation = name, os.urandom(16)
        self.storage = Storage(shape or Shape(), layout, total_blocks, kind=kind)
        self.agent = agent or LoopbackAgent(name, fabric)
        self.port, self.pair_log = QueuePort(), list[PairStatus]()
        self.estimates = list[PairEstimate]()
        self.kills, self.stops = list[tuple[int, str]](), list[str]()
        self._events: list[RankToHub] = []
        self.rank = RankTransceiver(
            self.storage.page_table(),
            0,
            Topology(),
            self.agent,
            self._events.append,
            probing=probing,
            bouncing=bouncing,
        )
        self.config = TransferConfig("loopback", **settings)  # pyright: ignore[reportArgumentType]
        self._make = (role, model, exited, dialect, tracing)
        self.server = RpcServer()
        self.endpoint = ""
        self.frozen = False
        self.scheduler = SchedulerTransceiver(self)

    def send(self, message: object) -> None:
        """SchedulerPort."""
        self.hub.from_scheduler(message)  # pyright: ignore[reportArgumentType]

    async def start(self, endpoint: str = "") -> None:
        role, model, exited, dialect, tracing = self._make
        self.endpoint = endpoint or f"127.0.0.1:{free_port()}"
        self.hub = TransferHub(
            instance_id=self.name,
            incarnation=self.incarnation,
            endpoint=self.endpoint,
            role=role,
            model=model,
            config=self.config,
            rank_ports=[self.port],
            deliver=self.scheduler.deliver,
            on_pair=self.pair_log.append,
            on_estimate=self.estimates.append,
            kill_rank=lambda rank, reason: self.kills.append((rank, reason)),
            stop_instance=self.stops.append,
            tracing=tracing,
            exited_incarnations=exited,
            dialect=dialect,
        )
        add_KvTransferServiceServicer_to_server(self.hub.servicer, self.server.server)
        await self.server.start(self.endpoint)
        self.rank.start()
        self._events.clear()
        self.hub.start([self.rank.info])
        self._pump = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            if not self.frozen:
                self.work()
            await asyncio.sleep(0.001)

    def work(self) -> None:
        """What the agent's thread would do."""
        while self.port.queue:
            self.rank.handle(self.port.queue.popleft())
        self.rank.poll()
        events, self._events[:] = list(self._events), []
        for event in events:
            self.hub.from_rank(0, event)

    async def sever(self) -> None:
        """Every stream to this hub breaks and none can be opened; the hub itself goes on."""
        await self.server.stop(0)

    async def restore(self) -> None:
        """Streams can be opened again, to the same incarnation at the same endpoint."""
        self.server = RpcServer()
        add_KvTransferServiceServicer_to_server(self.hub.servicer, self.server.server)
        await self.server.start(self.endpoint)

    def kill_rank(self) -> None:
        """The rank's process is gone and its parent has reaped it."""
        self.port.gone = self.frozen = True
        self.port.queue.clear()
        self.agent.die()
        self.hub.rank_exited(0, "signal 9")

    async def stop(self) -> None:
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        await self.hub.close()
        await self.server.stop(0)

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.name, self.incarnation, self.endpoint)

    @property
    def holder(self) -> Holder:
        return Holder(self.endpoint, self.name, self.incarnation)

    def offer(self, key: RequestKey, *ids: int, seed: int = 1) -> None:
        """Fills blocks with position-coded bytes and offers them."""
        self.storage.fill(np.array(ids, np.int32), seed)
        self.scheduler.respond_and_send_async(key, TokenRange(0, len(ids) * TOKENS_PER_BLOCK), blocks(*ids))

    def ask(self, key: RequestKey, holder: Holder, *ids: int, trace: TraceContext | None = None) -> None:
        """Exposes blocks for a whole prompt."""
        tokens = TokenRange(0, len(ids) * TOKENS_PER_BLOCK)
        self.scheduler.request_and_receive_async(ReceiveRequest(key, tokens, blocks(*ids), holder, trace))

    def block_bytes(self, *ids: int) -> list[bytes]:
        """Every buffer of the listed blocks, in prompt order."""
        size, where, memory = self.storage.shape.buffer, self.storage.where, self.storage.memory
        layers = range(len(self.storage.shape.layers))
        return [
            memory[(at := GUARD + where(layer, kv, block)) : at + size].tobytes()
            for block in ids
            for layer in layers
            for kv in (0, 1)
        ]


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Waits for a condition; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


async def connect(generation: Side, *contexts: Side) -> None:
    """Announces contexts and waits until all pairs are ready."""
    generation.hub.set_context_peers([context.address for context in contexts])
    await until(lambda: all(pair.state is PairState.READY for pair in generation.hub.pairs()))


def assert_hubs_idle(sides: Sequence[Side]) -> None:
    """No session, page or message is left anywhere."""
    for side in sides:
        assert side.hub.sessions() == []
        assert side.hub.is_idle()
        assert side.hub.in_doubt_pages() == 0
        assert side.scheduler.check_gen_transfer_complete()
