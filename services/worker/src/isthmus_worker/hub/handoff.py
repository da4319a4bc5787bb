"""The transfer hub inside a worker: kvtransfer on one side, engine process and registration on the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import cast

import grpc.aio
from isthmus.v1 import kv_transfer_service_pb2_grpc

from isthmus_core.config import TlsConfig
from isthmus_worker.engine import EngineDescription
from isthmus_worker.hub.late_service import LateService
from isthmus_worker.hub.observing import WorkerTelemetry
from isthmus_worker.hub.transfer_telemetry import TransferTelemetry
from isthmus_worker.process_engine import ExitReport, ProcessEngine
from isthmus_worker.settings import WorkerSettings
from isthmus_worker.wire.registration import ContextPeer, PairView
from kvtransfer.config import TransferConfig
from kvtransfer.hub import EngineStatus, PairEstimate, PairStatus, PeerAddress, TransferHub
from kvtransfer.ports import Holder, HubToRank, HubToScheduler, RankToHub, SchedulerToHub, TransferNotice
from kvtransfer.rank_info import InstanceRole, ModelFingerprint

logger = logging.getLogger(__name__)

# On top of transfer.drain_s: for the reports about a dead rank to reach the peers.
_REPORT_S = 1.0


class _EngineRankPort:
    """kvtransfer's way to one rank role of the engine."""

    def __init__(self, engine: ProcessEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank

    def send(self, message: HubToRank) -> None:
        """See kvtransfer.ports.RankPort."""
        self._engine.send_to_rank(self._rank, message)


class Handoff:
    """A started transfer hub."""

    def __init__(self, transfer: TransferHub, config: TransferConfig, ranks: int, watched: TransferTelemetry) -> None:
        self._transfer = transfer
        self._config = config
        self._ranks = ranks
        self._watched = watched

    def serve_on(self, service: LateService) -> None:
        """Answer KvTransferService."""
        # The generated function wants a server; of that it uses what LateService offers.
        server = cast("grpc.aio.Server", service)
        kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(self._transfer.servicer, server)

    def from_scheduler(self, message: SchedulerToHub) -> None:
        """The scheduler role of the engine process says."""
        self._transfer.from_scheduler(message)

    def from_rank(self, rank: int, message: RankToHub) -> None:
        """A rank role says."""
        self._transfer.from_rank(rank, message)
        if isinstance(message, TransferNotice):
            # After what goes to the peer, whose request waits for it.
            asyncio.get_running_loop().call_soon(self._watched.notice, message)

    def set_peers(self, peers: Sequence[ContextPeer]) -> None:
        """The complete list of context instances to keep a stream to."""
        self._watched.set_peers(peer.instance_id for peer in peers)
        self._transfer.set_context_peers(
            [PeerAddress(peer.instance_id, peer.incarnation, peer.endpoint) for peer in peers]
        )

    def in_doubt_pages(self) -> int:
        """Pages that a peer which can not be asked may still write."""
        return self._transfer.in_doubt_pages()

    async def set_role(self, role: InstanceRole) -> None:
        """Streams of the old role end. Raises KVTransferError while hand-offs are open."""
        await self._transfer.set_role(role)

    async def drain(self, deadline_s: float) -> None:
        """Wait until every session has ended. Raises TimeoutError after `deadline_s` seconds."""
        await self._transfer.drain(deadline_s)

    async def ranks_exited(self, report: ExitReport) -> None:
        """Every rank has exited: what they were writing is over once the fabric has drained. Returns when the peers
        have been told, or after a bounded time when they can not be reached."""
        for rank in range(self._ranks):
            self._transfer.rank_exited(rank, str(report))
        self._transfer.goodbye(str(report))
        try:
            await self._transfer.drain(self._config.drain_s + _REPORT_S)
        except TimeoutError:
            logger.warning("not every peer could be told that the engine process is gone")

    async def close(self) -> None:
        """End every stream."""
        await self._transfer.close()


def start_handoff(
    settings: WorkerSettings,
    config: TransferConfig,
    here: Holder,
    engine: ProcessEngine,
    description: EngineDescription,
    *,
    exited_incarnations: tuple[bytes, ...],
    telemetry: WorkerTelemetry,
    tls: TlsConfig,
    on_pair: Callable[[PairView], None],
    on_estimate: Callable[[PairEstimate], None],
    stop_instance: Callable[[str], None],
) -> Handoff:
    """A transfer hub between the engine process, which is ready, and the instance's peers."""
    watched = telemetry.transfers

    loop = asyncio.get_running_loop()

    def deliver(message: HubToScheduler) -> None:
        engine.deliver(message)
        # After what the engine and the peers wait for.
        loop.call_soon(watched.to_scheduler, message)

    def paired(pair: PairStatus) -> None:
        watched.pair(pair)
        on_pair(_view(pair))

    transfer = TransferHub(
        instance_id=here.instance_id,
        incarnation=here.incarnation,
        endpoint=here.endpoint,
        role=settings.role,
        model=ModelFingerprint(description.weights_digest, description.attention_digest, description.kv_dtype),
        config=config,
        rank_ports=[_EngineRankPort(engine, rank) for rank in range(engine.ranks)],
        deliver=deliver,
        on_pair=paired,
        on_estimate=on_estimate,
        kill_rank=engine.kill,
        stop_instance=stop_instance,
        tracing=telemetry.tracing,
        status=lambda: _status(engine),
        tls=tls,
        exited_incarnations=exited_incarnations,
    )
    transfer.start(engine.rank_infos)
    watched.watch(lambda: _pages(transfer), transfer.sessions)
    return Handoff(transfer, config, len(engine.rank_infos), watched)


def _view(pair: PairStatus) -> PairView:
    return PairView(pair.instance_id, pair.incarnation, pair.state.value, tuple(pair.incompatibilities))


def _pages(transfer: TransferHub) -> dict[str, int]:
    return {state.name.lower(): count for state, count in transfer.core.ledger.held().items()}


def _status(engine: ProcessEngine) -> EngineStatus:
    load = engine.load()
    return EngineStatus(max(0, load.total_blocks - load.used_blocks), load.total_blocks, engine.open_requests)
