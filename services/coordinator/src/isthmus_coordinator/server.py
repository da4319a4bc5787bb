"""CoordinatorService: what streams say goes into the cluster and the leases, what they must know comes out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_coordinator import wire, wire_route, wire_views
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.leases import LeaseTable
from isthmus_coordinator.member_streams import MemberStreams
from isthmus_coordinator.membership import Instance, StreamReplaced
from isthmus_coordinator.observing import CoordinatorMetrics
from isthmus_coordinator.outbox import Outbox
from isthmus_coordinator.placement import Served
from isthmus_coordinator.streams import end_with, exchange, first_message, unexpected
from isthmus_coordinator.watch import Watch
from isthmus_core.errors import IsthmusError, Unreachable
from isthmus_core.ids import EPOCH_MS, IdLease
from isthmus_core.rpc import abort_with
from isthmus_core.tracing import Tracing

logger = logging.getLogger(__name__)

# Changes of this long are told together: a cluster that starts reports its pairs in a burst.
_PUBLISH_S = 0.005
# Watchers are told what has changed in this time.
_WATCH_S = 0.1

_RegisterRequest = coordinator_service_pb2.RegisterRequest
_RouteRequest = coordinator_service_pb2.RouteRequest


def wall_ms() -> int:
    """Milliseconds since 2026-01-01T00:00:00Z by the system's clock."""
    return time.time_ns() // 1_000_000 - EPOCH_MS


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of streams. `hello_s`: seconds a stream may take to begin. `answers`: answers that may wait for a router
    to read them. `settle_s`: seconds after the start during which no generation instance is told its peers: those it
    has streams to may not have come back to a restarted coordinator yet, and must not be taken from it."""

    hello_s: float = 10.0
    answers: int = 4096
    settle_s: float = 0.0


class CoordinatorServicer(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    """The service. One event loop owns it and all its state."""

    def __init__(
        self,
        leases: LeaseTable,
        tracing: Tracing,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        clock_ms: Callable[[], int] = wall_ms,
        metrics: CoordinatorMetrics | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self._cluster = cluster or Cluster()
        self._leases, self._tracing, self._limits = leases, tracing, limits
        self._clock, self._clock_ms = clock, clock_ms
        self._members = MemberStreams(self._cluster, self._publish_soon)
        self._routers: dict[int, Outbox[wire_route.RouteResponse]] = {}
        self._tokens = itertools.count(1)
        self._served: tuple[Served, ...] = ()
        self._publishing: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._stopping = False
        self._settled_at = clock() + limits.settle_s
        self._metrics = metrics or CoordinatorMetrics()
        self._metrics.watch(self._cluster, lambda: len(self._routers))

    def end_streams(self) -> None:
        """The coordinator is stopping: end every stream, now and to come, so that its peer looks for another one."""
        self._stopping = True
        for timer in (self._publishing, self._settling):
            if timer is not None:
                timer.cancel()
        for outbox in self._routers.values():
            outbox.end(_stopping())
        self._members.end_all(_stopping())

    @property
    def open_streams(self) -> int:
        """Instances and routers that are connected."""
        return len(self._members) + len(self._routers)

    def idle(self) -> bool:
        """True when no stream is open and nothing is held for one. Raises InternalError when counts have drifted."""
        self._cluster.check()
        return not (self.open_streams or self._cluster.open_requests() or self._leases.held())

    async def Register(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """An instance's membership."""
        try:
            first: _RegisterRequest = await first_message(context, self._limits.hello_s)
            await self._serve_member(context, wire.instance_from_pb(first.hello.instance))
        except IsthmusError as error:
            await end_with(context, error)

    async def Route(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """A router's requests."""
        try:
            first: _RouteRequest = await first_message(context, self._limits.hello_s)
            await self._serve_router(context, first.hello)
        except IsthmusError as error:
            await end_with(context, error)

    async def GetCluster(
        self,
        request: coordinator_service_pb2.GetClusterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> coordinator_service_pb2.GetClusterResponse:
        """Everything."""
        cluster = self._cluster
        return wire_views.cluster_to_pb(cluster.members(), cluster.pairs(), cluster.served(), cluster.open_requests())

    async def WatchCluster(
        self, request: coordinator_service_pb2.WatchClusterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Everything, then what has changed, a few times a second at most. A slow reader is told less often."""
        watch, sequence = Watch(), 0
        while not self._stopping:
            news = watch.news(self._cluster)
            if news is not None:
                sequence += 1
                message = wire_views.news_to_pb(news, sequence, self._cluster.policy.wants_keys)
                await context.write(message)
            await asyncio.sleep(_WATCH_S)
        await abort_with(context, _stopping())

    async def Drain(
        self, request: coordinator_service_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_service_pb2.DrainResponse:
        """Orders an instance to finish and exit."""
        try:
            self._members.drain(request.instance_id, wire.deadline_from_pb(request))
        except IsthmusError as error:
            await abort_with(context, error)
        return coordinator_service_pb2.DrainResponse()

    async def SetRole(
        self, request: coordinator_service_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_service_pb2.SetRoleResponse:
        """Orders an instance to take another role."""
        try:
            role = wire.role_from_pb(request.role, "role")
            self._members.set_role(request.instance_id, role, wire.deadline_from_pb(request))
        except IsthmusError as error:
            await abort_with(context, error)
        return coordinator_service_pb2.SetRoleResponse()

    # Instances

    async def _serve_member(self, context: grpc.aio.ServicerContext[Any, Any], instance: Instance) -> None:
        self._refuse_when_stopping()
        stream = self._members.open(instance)
        try:
            await exchange(context, stream.outbox, lambda message: self._members.hear(stream, message))
        finally:
            self._members.close(stream)

    # Routers

    async def _serve_router(
        self, context: grpc.aio.ServicerContext[Any, Any], hello: coordinator_service_pb2.RouteHello
    ) -> None:
        self._refuse_when_stopping()
        router_id, placements = wire_route.router_id_from_pb(hello), wire_route.open_from_pb(hello)
        token = next(self._tokens)
        lease = self._lease(token, router_id, hello)
        self._cluster.adopt(token, placements)
        outbox: Outbox[wire_route.RouteResponse] = Outbox(f"route stream of {router_id}", self._limits.answers)
        self._routers[token] = outbox
        outbox.post(wire_route.route_welcome(lease))
        outbox.put_state("served", self._served_to_pb)
        extra = {"router_id": router_id, "open": len(placements)}
        logger.info("router joined with id bits %d/%d", lease.node_id, lease.process_id, extra=extra)
        try:
            await exchange(context, outbox, lambda message: self._from_router(token, outbox, message))
        finally:
            del self._routers[token]
            self._leases.release(token, self._clock())
            released = self._cluster.drop_router(token)
            logger.info("router left, %d placements released", released, extra={"router_id": router_id})

    def _lease(self, token: int, router_id: str, hello: coordinator_service_pb2.RouteHello) -> IdLease:
        """New bits, or the presented ones confirmed. What is left of a broken stream of this router ends."""
        now = self._clock()
        if not hello.HasField("lease"):
            return self._leases.grant(token, router_id, now, self._clock_ms())
        lease, old = self._leases.present(token, router_id, wire_route.lease_from_pb(hello.lease), now)
        if old is not None:
            self._cluster.drop_router(old)
            self._routers[old].end(StreamReplaced(f"router {router_id}"))
        return lease

    def _from_router(self, token: int, outbox: Outbox[wire_route.RouteResponse], message: _RouteRequest) -> None:
        match message.WhichOneof("body"):
            case "select":
                outbox.post(self._select(token, message.select))
            case "prefilled":
                self._cluster.prefilled(token, wire_route.key_from_pb(message.prefilled.key, "prefilled.key"))
            case "finish":
                # A router may finish what a broken stream has released before; then there is nothing to do.
                self._cluster.finish(token, wire_route.key_from_pb(message.finish.key, "finish.key"))
            case other:
                raise unexpected(other, "send select, prefilled or finish after hello")

    def _select(self, token: int, select: coordinator_service_pb2.Select) -> wire_route.RouteResponse:
        began = self._clock()
        span = self._tracing.begin("coordinator.route", wire_route.trace_from_pb(select), kind="server")
        span.set("isthmus.model", select.model)
        span.set("isthmus.request_id", str(select.key.request_id))
        span.set("isthmus.policy", self._cluster.policy.value)
        try:
            choice = self._cluster.select(token, wire_route.question_from_pb(select))
        except IsthmusError as error:
            self._metrics.placed(self._cluster.policy.value, self._clock() - began, error)
            span.end(error=error.message)
            return wire_route.refusal_to_pb(select.key, error)
        placement = choice.placement
        span.set("isthmus.candidates", choice.candidates)
        if placement.context is not None:
            span.set("isthmus.context_instance", placement.context.instance_id)
        span.set("isthmus.generation_instance", placement.generation.instance_id)
        span.end()
        self._metrics.placed(self._cluster.policy.value, self._clock() - began)
        return wire_route.selected_to_pb(select.key, choice, self._cluster.policy.value)

    def _served_to_pb(self) -> wire_route.RouteResponse:
        served = wire_route.served_to_pb(self._served, self._cluster.policy.wants_keys)
        return wire_route.RouteResponse(served=served)

    # News

    def _publish_soon(self) -> None:
        if self._publishing is None and not self._stopping:
            self._publishing = asyncio.get_running_loop().call_later(_PUBLISH_S, self._publish)

    def _publish(self) -> None:
        """Tell every stream what has changed for it."""
        self._publishing = None
        served = self._cluster.served()
        if served != self._served:
            self._served = served
            logger.info("serving %s", ", ".join(one.name for one in served) or "nothing")
            for outbox in self._routers.values():
                outbox.put_state("served", self._served_to_pb)
        if (left := self._settled_at - self._clock()) > 0:
            if self._settling is None:
                self._settling = asyncio.get_running_loop().call_later(left, self._publish_soon)
            return
        self._members.tell_peers()

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise _stopping()


def _stopping() -> Unreachable:
    return Unreachable("the coordinator is stopping")
