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

from isthmus_coordinator import wire
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.leases import LeaseTable
from isthmus_coordinator.membership import Instance, Member, Role, StreamReplaced
from isthmus_coordinator.outbox import Outbox
from isthmus_coordinator.placement import POLICY, Served
from isthmus_coordinator.streams import end_with, exchange, first_message, unexpected
from isthmus_core.errors import IsthmusError, Unreachable
from isthmus_core.ids import EPOCH_MS, IdLease
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Tracing

logger = logging.getLogger(__name__)

# Changes of this long are told together: a cluster that starts reports its pairs in a burst.
_PUBLISH_S = 0.005

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


@dataclass(slots=True)
class _MemberStream:
    member: Member
    outbox: Outbox[wire.RegisterResponse]
    told: tuple[Instance, ...] | None = None


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
    ) -> None:
        self._cluster = Cluster()
        self._leases, self._tracing, self._limits = leases, tracing, limits
        self._clock, self._clock_ms = clock, clock_ms
        self._members: dict[int, _MemberStream] = {}
        self._routers: dict[int, Outbox[wire.RouteResponse]] = {}
        self._tokens = itertools.count(1)
        self._served: tuple[Served, ...] = ()
        self._publishing: asyncio.TimerHandle | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._stopping = False
        self._settled_at = clock() + limits.settle_s

    def end_streams(self) -> None:
        """The coordinator is stopping: end every stream, now and to come, so that its peer looks for another one."""
        self._stopping = True
        for timer in (self._publishing, self._settling):
            if timer is not None:
                timer.cancel()
        for outbox in [*self._routers.values(), *(stream.outbox for stream in self._members.values())]:
            outbox.end(_stopping())

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
        return wire.cluster_to_pb(cluster.members(), cluster.pairs(), cluster.served(), cluster.open_requests())

    # Instances

    async def _serve_member(self, context: grpc.aio.ServicerContext[Any, Any], instance: Instance) -> None:
        self._refuse_when_stopping()
        member, replaced = self._cluster.join(instance)
        if replaced is not None:
            old, error = replaced
            self._members[old.token].outbox.end(error)
        outbox: Outbox[wire.RegisterResponse] = Outbox(f"register stream of {instance.instance_id}", 1)
        stream = self._members[member.token] = _MemberStream(member, outbox)
        outbox.post(wire.register_welcome())
        self._publish_soon()
        extra = {"instance_id": instance.instance_id, "incarnation": instance.incarnation.hex()}
        logger.info("%s instance at %s joined", instance.role.name.lower(), instance.endpoint, extra=extra)
        try:
            await exchange(context, outbox, lambda message: self._from_member(stream, message))
        finally:
            del self._members[member.token]
            left = self._cluster.leave(member)
            logger.info("instance %s", "left" if left else "was replaced", extra=extra)
            self._publish_soon()

    def _from_member(self, stream: _MemberStream, message: _RegisterRequest) -> None:
        member = stream.member
        match message.WhichOneof("body"):
            case "load":
                self._cluster.set_load(member, wire.load_from_pb(message.load))
            case "pair":
                start, pair = wire.pair_from_pb(message.pair)
                if self._cluster.report(member, start, pair):
                    names = f"{start.instance_id} -> {member.instance.instance_id}"
                    logger.info("pair %s is %s", names, pair.state.name.lower())
                    self._publish_soon()
            case "draining":
                self._cluster.set_draining(member)
                self._publish_soon()
            case other:
                raise unexpected(other, "send load, pair or draining after hello")

    def _peers(self, stream: _MemberStream) -> wire.RegisterResponse:
        """The list as it is when it is written, and from then on the one that reports are held against."""
        stream.told = self._cluster.peers(stream.member)
        self._cluster.announced(stream.member, stream.told)
        return wire.peers_to_pb(stream.told)

    # Routers

    async def _serve_router(
        self, context: grpc.aio.ServicerContext[Any, Any], hello: coordinator_service_pb2.RouteHello
    ) -> None:
        self._refuse_when_stopping()
        router_id, placements = wire.router_id_from_pb(hello), wire.open_from_pb(hello)
        token = next(self._tokens)
        lease = self._lease(token, router_id, hello)
        self._cluster.adopt(token, placements)
        outbox: Outbox[wire.RouteResponse] = Outbox(f"route stream of {router_id}", self._limits.answers)
        self._routers[token] = outbox
        outbox.post(wire.route_welcome(lease))
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
        lease, old = self._leases.present(token, router_id, wire.lease_from_pb(hello.lease), now)
        if old is not None:
            self._cluster.drop_router(old)
            self._routers[old].end(StreamReplaced(f"router {router_id}"))
        return lease

    def _from_router(self, token: int, outbox: Outbox[wire.RouteResponse], message: _RouteRequest) -> None:
        match message.WhichOneof("body"):
            case "select":
                outbox.post(self._select(token, message.select))
            case "finish":
                # A router may finish what a broken stream has released before; then there is nothing to do.
                self._cluster.finish(token, wire.key_from_pb(message.finish.key, "finish.key"))
            case other:
                raise unexpected(other, "send select or finish after hello")

    def _select(self, token: int, select: coordinator_service_pb2.Select) -> wire.RouteResponse:
        span = self._tracing.begin("coordinator.route", wire.trace_from_pb(select), kind="server")
        span.set("isthmus.model", select.model)
        span.set("isthmus.request_id", str(select.key.request_id))
        span.set("isthmus.policy", POLICY)
        try:
            key: RequestKey = wire.key_from_pb(select.key, "select.key")
            choice = self._cluster.select(token, key, select.model, select.prompt_tokens, select.max_tokens)
        except IsthmusError as error:
            span.end(error=error.message)
            return wire.refusal_to_pb(select.key, error)
        placement = choice.placement
        span.set("isthmus.candidates", choice.candidates)
        if placement.context is not None:
            span.set("isthmus.context_instance", placement.context.instance_id)
        span.set("isthmus.generation_instance", placement.generation.instance_id)
        span.end()
        return wire.selected_to_pb(select.key, placement)

    def _served_to_pb(self) -> wire.RouteResponse:
        return wire.served_to_pb(self._served)

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
        for stream in self._members.values():
            if stream.member.instance.role is Role.GENERATION and stream.told != self._cluster.peers(stream.member):
                stream.outbox.put_state("peers", lambda stream=stream: self._peers(stream))

    def _refuse_when_stopping(self) -> None:
        if self._stopping:
            raise _stopping()


def _stopping() -> Unreachable:
    return Unreachable("the coordinator is stopping")
