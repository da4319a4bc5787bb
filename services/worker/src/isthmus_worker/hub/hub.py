"""The life of a worker: start in order, serve, leave in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from isthmus.v1 import kv_transfer_service_pb2, member_service_pb2, worker_service_pb2, worker_service_pb2_grpc

from isthmus_core.block_keys import Keying
from isthmus_core.config import IsthmusConfig
from isthmus_core.ids import new_incarnation
from isthmus_core.instance_lock import InstanceLock, acquire
from isthmus_core.logs import setup_logging
from isthmus_core.process import settle_heap
from isthmus_core.rpc import RpcServer
from isthmus_worker.engine import EngineDescription, EngineLoad
from isthmus_worker.hub.late_service import LateService
from isthmus_worker.hub.make_engine import make_engine
from isthmus_worker.hub.member_servicer import serve_member
from isthmus_worker.hub.observing import WorkerTelemetry
from isthmus_worker.hub.role_switch import RoleEdges, RoleSwitch
from isthmus_worker.hub.servicer import Serving, WorkerServicer
from isthmus_worker.process_engine import ProcessEngine
from isthmus_worker.registration import Registration
from isthmus_worker.settings import WorkerSettings, child_environment, join_address, worker_settings
from isthmus_worker.wire.registration import (
    ContextPeer,
    DrainOrder,
    InstanceDescription,
    Order,
    PairView,
    RoleOrder,
)
from kvtransfer.ports import Holder, RankToHub, SchedulerToHub
from kvtransfer.rank_info import InstanceRole

if TYPE_CHECKING:
    from isthmus_worker.hub.handoff import Handoff
    from kvtransfer.hub import PairEstimate

logger = logging.getLogger(__name__)

SERVICE = "isthmus-worker"
# Calls whose leg has ended only have to hand their status over.
_SERVER_GRACE_S = 1.0
# Placements that were on their way when a change of role began.
_LAST_LEGS_S = 5.0
_KV_TRANSFER = kv_transfer_service_pb2.DESCRIPTOR.services_by_name["KvTransferService"]
_MEMBER = member_service_pb2.DESCRIPTOR.services_by_name["MemberService"]


class Hub:
    """One worker instance: gRPC server, engine process, hand-offs, membership.

    `start`, then `run` until it is asked to stop or loses its engine, then `close` (also after a failed `start`).
    """

    def __init__(self, config: IsthmusConfig, settings: WorkerSettings, environment: dict[str, str]) -> None:
        self._config, self._settings, self._environment = config, settings, environment
        self._server = RpcServer(config.tls)
        self._servicer = WorkerServicer(settings.role)
        self._transfer_service = LateService(_KV_TRANSFER.full_name)
        self._member_service = LateService(_MEMBER.full_name)
        self._telemetry: WorkerTelemetry | None = None
        self._lock: InstanceLock | None = None
        self._engine: ProcessEngine | None = None
        self._handoff: Handoff | None = None
        self._registration: Registration | None = None
        self._leaving = False
        possible = () if settings.transfer is None else tuple(InstanceRole)
        self._roles = RoleSwitch(settings.role, possible, settings.drain_s)
        # Seconds that an ordered drain may take.
        self._drain_order: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        # Why the transfer hub can not go on.
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._health_changed = asyncio.Event()
        self._health_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Port, lock, engine, hand-offs, membership, in this order. Raises ConfigError or StartError."""
        settings = self._settings
        port = await self._bind()
        here = Holder(settings.endpoint(port), settings.instance_id(port), new_incarnation())
        setup_logging(self._config.logging, SERVICE, here.instance_id)
        telemetry = self._telemetry = WorkerTelemetry(
            self._config.telemetry, here.instance_id, settings.role.name.lower()
        )
        telemetry.watch(self._load, lambda: self._registration is not None and self._registration.is_member)
        self._lock = await acquire(settings.state_dir, here.instance_id, here.incarnation)
        engine = self._engine = self._make_engine(here, self._lock, telemetry)
        description = await engine.start()
        self._start_handoff(here, engine, description, self._lock, telemetry)
        self._servicer.serve(Serving(engine, here, self._load, telemetry.legs))
        settle_heap()
        await self._register(here, description)
        logger.info("serving %s as %s at %s (%s)", settings.model, settings.role_name, here.endpoint, description.name)

    async def _bind(self) -> int:
        """Listen before anything is spawned: a taken port is found now, and probes see NOT_SERVING while a model
        loads."""
        self._server.expose(worker_service_pb2.DESCRIPTOR)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server.server)
        if self._settings.transfer is not None:
            self._server.expose(kv_transfer_service_pb2.DESCRIPTOR)
            self._server.server.add_generic_rpc_handlers((self._transfer_service,))
        if self._settings.coordinator is None:
            self._server.expose(member_service_pb2.DESCRIPTOR)
            self._server.server.add_generic_rpc_handlers((self._member_service,))
        address = join_address(self._settings.listen_host, self._settings.listen_port)
        port = await self._server.start(address, "worker.listen")
        self._health_task = asyncio.create_task(self._follow_health())
        return port

    def _make_engine(self, here: Holder, lock: InstanceLock, telemetry: WorkerTelemetry) -> ProcessEngine:
        return make_engine(
            self._config,
            self._settings,
            here,
            self._environment,
            lock.fd,
            on_transfer=self._from_scheduler,
            on_rank=self._from_rank,
            on_load=self._on_load,
            on_end=telemetry.legs.reported,
        )

    def _start_handoff(
        self,
        here: Holder,
        engine: ProcessEngine,
        description: EngineDescription,
        lock: InstanceLock,
        telemetry: WorkerTelemetry,
    ) -> None:
        if self._settings.transfer is None:
            return
        from isthmus_worker.hub.handoff import start_handoff  # an instance that does both needs none of it

        self._handoff = start_handoff(
            self._settings,
            self._settings.transfer,
            here,
            engine,
            description,
            exited_incarnations=lock.exited,
            telemetry=telemetry,
            tls=self._config.tls,
            on_pair=self._on_pair,
            on_estimate=self._on_estimate,
            stop_instance=self._give_up,
        )
        self._handoff.serve_on(self._transfer_service)

    async def _register(self, here: Holder, description: EngineDescription) -> None:
        instance = InstanceDescription(
            instance_id=here.instance_id,
            incarnation=here.incarnation,
            endpoint=here.endpoint,
            role=self._settings.role,
            model=self._settings.model,
            max_model_len=description.max_model_len,
            tokens_per_block=description.tokens_per_block,
            engine=description.name,
            total_blocks=description.total_blocks,
            keying=self._keying(description),
            possible_roles=self._roles.possible,
        )
        self._registration = Registration(
            self._settings.coordinator,
            instance,
            tls=self._config.tls,
            on_peers=self._on_peers,
            on_member=lambda _: self._health_changed.set(),
            on_order=self._follow_order,
            kv_events=None if self._engine is None else self._engine.kv_events,
        )
        self._registration.set_load(self._load())
        serve_member(self._member_service, self._registration)
        await self._registration.start(self._settings.start_timeout_s)

    def _keying(self, description: EngineDescription) -> Keying | None:
        """How the engine names its reusable blocks; None when it keeps none."""
        if not self._config.engine.prefix_caching:
            return None
        return Keying(
            description.weights_digest, description.attention_digest, description.kv_dtype, description.tokens_per_block
        )

    async def run(self, stopping: asyncio.Event) -> str | None:
        """Serve until `stopping`, then drain: None. The reason, one line, when the engine process ends before that or
        the coordinator will not have this instance any more."""
        engine, registration = self._engine, self._registration
        if engine is None or registration is None:
            raise RuntimeError("run before start")
        stop = asyncio.create_task(stopping.wait())
        try:
            ends = [stop, engine.exited, registration.refused, self._given_up, self._drain_order]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        self._leaving = True
        self._health_changed.set()
        await self._roles.close()
        registration.set_draining()
        if self._given_up.done():
            return self._given_up.result()
        if not engine.exited.done():
            await self._drain(engine)
        if engine.exited.done():
            return str(engine.exited.result())
        if registration.refused.done():
            return f"the coordinator refuses this instance: {registration.refused.result()}"
        return None

    async def _drain(self, engine: ProcessEngine) -> None:
        """No new work; what runs and what is held may take worker.drain_s."""
        drain_s = self._drain_order.result() if self._drain_order.done() else self._settings.drain_s
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_s
        logger.info("draining %d requests, at most %g s", engine.open_requests, drain_s)
        try:
            await engine.drain(drain_s)
            if self._handoff is not None:
                await self._handoff.drain(max(0.0, deadline - loop.time()))
        except TimeoutError:
            logger.warning("%d requests are still open after %g s (worker.drain_s)", engine.open_requests, drain_s)

    def _follow_order(self, order: Order) -> None:
        """What an operator wants, by way of the coordinator."""
        registration = self._registration
        if registration is None or self._leaving:
            return
        match order:
            case DrainOrder(deadline_s):
                if not self._drain_order.done():
                    self._drain_order.set_result(self._settings.drain_s if deadline_s is None else deadline_s)
            case RoleOrder():
                self._roles.order(order, RoleEdges(registration.set_role, self._without_work, self._take_role))

    async def _without_work(self, deadline_s: float) -> None:
        """Returns when nothing is open. Raises TimeoutError."""
        if self._engine is None or self._handoff is None:
            raise RuntimeError("a change of role before the start")
        async with asyncio.timeout(deadline_s):
            await self._engine.idle()
            await self._handoff.drain(deadline_s)

    async def _take_role(self, role: InstanceRole) -> None:
        """Raises TimeoutError when work of the old role that came last does not end."""
        self._servicer.set_role(role)
        try:
            await self._without_work(_LAST_LEGS_S)
        except TimeoutError:
            self._servicer.set_role(self._roles.role)
            raise
        if self._handoff is not None:
            await self._handoff.set_role(role)

    async def close(self) -> None:
        """Leave: engine process, reports to the peers, membership, server. Works after any part of `start`."""
        self._leaving = True
        self._health_changed.set()
        if self._engine is not None:
            await self._engine.stop()
            if self._handoff is not None and self._engine.exited.done():
                await self._handoff.ranks_exited(self._engine.exited.result())
        if self._registration is not None:
            await self._registration.close()
        if self._handoff is not None:
            await self._handoff.close()
        await self._server.stop(_SERVER_GRACE_S)
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        if self._telemetry is not None:
            await asyncio.to_thread(self._telemetry.shutdown)
        if self._lock is not None:
            self._lock.release()

    async def _follow_health(self) -> None:
        """SERVING = registered with a ready engine and not leaving. Pairs are the coordinator's business."""
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            registered = self._registration is not None and self._registration.is_member
            await self._server.set_serving(registered and not self._leaving)

    def _load(self) -> EngineLoad:
        load = EngineLoad() if self._engine is None else self._engine.load()
        in_doubt = 0 if self._handoff is None else self._handoff.in_doubt_pages()
        return replace(load, in_doubt_blocks=in_doubt)

    def _on_load(self, _: EngineLoad) -> None:
        if self._registration is not None:
            self._registration.set_load(self._load())

    def _give_up(self, reason: str) -> None:
        """The transfer hub can not keep its promises any longer: the instance ends, with this reason."""
        if not self._given_up.done():
            self._given_up.set_result(reason)

    def _on_pair(self, pair: PairView) -> None:
        if self._registration is not None:
            self._registration.set_pair(pair)
            # A stream that broke or came back changes what is in doubt, which the engine knows nothing of.
            self._registration.set_load(self._load())

    def _on_estimate(self, estimate: PairEstimate) -> None:
        if self._registration is not None:
            self._registration.set_estimate(estimate)

    def _on_peers(self, peers: Sequence[ContextPeer]) -> None:
        if self._handoff is not None:
            self._handoff.set_peers(peers)

    def _from_scheduler(self, message: SchedulerToHub) -> None:
        if self._handoff is None:
            raise RuntimeError(f"{type(message).__name__} before the hand-off was started")
        self._handoff.from_scheduler(message)

    def _from_rank(self, rank: int, message: RankToHub) -> None:
        if self._handoff is None:
            raise RuntimeError(f"{type(message).__name__} before the hand-off was started")
        self._handoff.from_rank(rank, message)


def build_hub(config: IsthmusConfig) -> Hub:
    """A worker that has not been started. Raises ConfigError naming the key; needs a running event loop."""
    settings = worker_settings(config)
    return Hub(config, settings, child_environment(config, settings))
