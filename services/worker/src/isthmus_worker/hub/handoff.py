"""The transfer hub inside a worker: kvtransfer on one side, engine process and registration on the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

import grpc.aio
from isthmus.v1 import kv_transfer_service_pb2_grpc

from isthmus_core.config import TlsConfig
from isthmus_core.tracing import Tracing
from isthmus_worker.engine import EngineDescription
from isthmus_worker.hub.late_service import LateService
from isthmus_worker.process_engine import ExitReport, ProcessEngine
from isthmus_worker.settings import WorkerSettings
from isthmus_worker.wire.registration import ContextPeer, PairView
from kvtransfer.config import TransferConfig
from kvtransfer.hub import EngineStatus, PairStatus, PeerAddress, TransferHub
from kvtransfer.ports import Holder, HubToRank, RankToHub, SchedulerToHub
from kvtransfer.rank_info import ModelFingerprint

logger = logging.getLogger(__name__)

# On top of transfer.drain_s: for the reports about a dead rank to reach the peers.
_REPORT_S = 1.0


class _EngineRankPort:
    """kvtransfer's way to the rank role of the engine process."""

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine

    def send(self, message: HubToRank) -> None:
        """See kvtransfer.ports.RankPort."""
        self._engine.send_to_rank(message)


class Handoff:
    """A started transfer hub."""

    def __init__(self, transfer: TransferHub, config: TransferConfig, ranks: int) -> None:
        self._transfer = transfer
        self._config = config
        self._ranks = ranks

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

    def set_peers(self, peers: Sequence[ContextPeer]) -> None:
        """The complete list of context instances to keep a stream to."""
        self._transfer.set_context_peers(
            [PeerAddress(peer.instance_id, peer.incarnation, peer.endpoint) for peer in peers]
        )

    def in_doubt_pages(self) -> int:
        """Pages that a peer which can not be asked may still write."""
        return self._transfer.in_doubt_pages()

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
    tracing: Tracing,
    tls: TlsConfig,
    on_pair: Callable[[PairView], None],
    stop_instance: Callable[[str], None],
) -> Handoff:
    """A transfer hub between the engine process, which is ready, and the instance's peers."""
    transfer = TransferHub(
        instance_id=here.instance_id,
        incarnation=here.incarnation,
        endpoint=here.endpoint,
        role=settings.role,
        model=ModelFingerprint(description.weights_digest, description.attention_digest, description.kv_dtype),
        config=config,
        rank_ports=[_EngineRankPort(engine)],
        deliver=engine.deliver,
        on_pair=lambda pair: on_pair(_view(pair)),
        kill_rank=lambda _, reason: engine.kill(reason),
        stop_instance=stop_instance,
        tracing=tracing,
        status=lambda: _status(engine),
        tls=tls,
        exited_incarnations=exited_incarnations,
    )
    transfer.start(engine.rank_infos)
    return Handoff(transfer, config, len(engine.rank_infos))


def _view(pair: PairStatus) -> PairView:
    return PairView(pair.instance_id, pair.incarnation, pair.state.value, tuple(pair.incompatibilities))


def _status(engine: ProcessEngine) -> EngineStatus:
    load = engine.load()
    return EngineStatus(max(0, load.total_blocks - load.used_blocks), load.total_blocks, engine.open_requests)
