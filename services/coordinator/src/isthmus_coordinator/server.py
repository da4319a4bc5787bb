"""CoordinatorService: what streams say goes into the cluster and the leases, what they must know comes out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_coordinator import wire, wire_views
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.leases import LeaseTable
from isthmus_coordinator.member_streams import MemberStreams
from isthmus_coordinator.membership import Instance
from isthmus_coordinator.observing import CoordinatorMetrics
from isthmus_coordinator.router_streams import RouterStreams
from isthmus_coordinator.streams import end_with, exchange, first_message
from isthmus_coordinator.watch import Watch
from isthmus_core.errors import IsthmusError, Unreachable
from isthmus_core.ids import EPOCH_MS
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
    to read them. `settle_s`: seconds after the start in which instances may still be on their way back to a restarted
    coordinator: no generation instance is told its peers, as those it has streams to must not be taken from it, and no
    request is refused because nobody can serve it."""

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
        self._leases, self._limits, self._clock = leases, limits, clock
        self.members = MemberStreams(self._cluster, self._publish_soon)
        self._publishing: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._stopping = False
        self._settled_at = clock() + limits.settle_s
        metrics = metrics or CoordinatorMetrics()
        self._routers = RouterStreams(
            self._cluster, leases, tracing, metrics, limits.answers, self._settled, self._when_settled, clock, clock_ms
        )
        metrics.watch(self._cluster, lambda: len(self._routers))

    def end_streams(self) -> None:
        """The coordinator is stopping: end every stream, now and to come, so that its peer looks for another one."""
        self._stopping = True
        for timer in (self._publishing, self._settling):
            if timer is not None:
                timer.cancel()
        self._routers.end_all(_stopping())
        self.members.end_all(_stopping())

    @property
    def open_streams(self) -> int:
        """Instances and routers that are connected."""
        return len(self.members) + len(self._routers)

    def idle(self) -> bool:
        """True when no stream is open and nothing is held for one. Raises InternalError when counts have drifted."""
        self._cluster.check()
        return not (self.open_streams or self._cluster.open_requests() or self._leases.held() or self._routers.held)

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
        pairs = () if request.without_pairs else cluster.pairs()
        return wire_views.cluster_to_pb(cluster.members(), pairs, cluster.served(), cluster.open_requests())

    async def WatchCluster(
        self, request: coordinator_service_pb2.WatchClusterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Everything, then what has changed, a few times a second at most. A slow reader is told less often.

        Nothing before the coordinator has settled: what a watcher knows of its predecessor's members is better."""
        watch, sequence = Watch(), 0
        while not self._stopping:
            news = watch.news(self._cluster) if self._settled() else None
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
            self.members.drain(request.instance_id, wire.deadline_from_pb(request))
        except IsthmusError as error:
            await abort_with(context, error)
        return coordinator_service_pb2.DrainResponse()

    async def SetRole(
        self, request: coordinator_service_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> coordinator_service_pb2.SetRoleResponse:
        """Orders an instance to take another role."""
        try:
            role = wire.role_from_pb(request.role, "role")
            self.members.set_role(request.instance_id, role, wire.deadline_from_pb(request))
        except IsthmusError as error:
            await abort_with(context, error)
        return coordinator_service_pb2.SetRoleResponse()

    # Instances

    async def _serve_member(self, context: grpc.aio.ServicerContext[Any, Any], instance: Instance) -> None:
        self._refuse_when_stopping()
        stream = self.members.open(instance)
        try:
            await exchange(context, stream.outbox, lambda message: self.members.hear(stream, message))
        finally:
            self.members.close(stream)

    # Routers

    async def _serve_router(
        self, context: grpc.aio.ServicerContext[Any, Any], hello: coordinator_service_pb2.RouteHello
    ) -> None:
        self._refuse_when_stopping()
        stream = self._routers.open(hello)
        try:
            await exchange(context, stream.outbox, lambda message: self._routers.hear(stream, message))
        finally:
            self._routers.close(stream)

    # News

    def _publish_soon(self) -> None:
        if self._publishing is None and not self._stopping:
            self._publishing = asyncio.get_running_loop().call_later(_PUBLISH_S, self._publish)

    def _publish(self) -> None:
        """Tell every stream what has changed for it."""
        self._publishing = None
        self._routers.changed()
        if not self._settled():
            self._when_settled()
            return
        self.members.tell_peers()

    def _settled(self) -> bool:
        return self._clock() >= self._settled_at

    def _when_settled(self) -> None:
        """Publish when the coordinator has settled, whether anything changes until then or not."""
        if self._settling is None and not self._stopping:
            left = max(0.0, self._settled_at - self._clock())
            self._settling = asyncio.get_running_loop().call_later(left, self._look_settled)

    def _look_settled(self) -> None:
        self._settling = None
        self._publish_soon()

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise _stopping()


def _stopping() -> Unreachable:
    return Unreachable("the coordinator is stopping")
