"""Route streams: requests find their places, ids are leased, and routers hear what can be served."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.v1 import coordinator_service_pb2

from isthmus_coordinator import wire_route
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.held_selects import HeldSelects, Select
from isthmus_coordinator.leases import LeaseTable
from isthmus_coordinator.membership import StreamReplaced
from isthmus_coordinator.observing import CoordinatorMetrics
from isthmus_coordinator.outbox import Outbox
from isthmus_coordinator.placement import Served
from isthmus_coordinator.streams import unexpected
from isthmus_core.errors import IsthmusError, NoCapacity, RequestCancelled, UnknownModel
from isthmus_core.ids import IdLease
from isthmus_core.tracing import Span, Tracing

logger = logging.getLogger(__name__)

_RouteRequest = coordinator_service_pb2.RouteRequest
_RouteHello = coordinator_service_pb2.RouteHello


@dataclass(slots=True, eq=False)
class RouterStream:
    """One Route stream."""

    token: int
    router_id: str
    outbox: Outbox[wire_route.RouteResponse]


class RouterStreams:
    """All Route streams. `answers`: answers that may wait for a router to read them. `settled()`: False while instances
    of a restarted coordinator may still be on their way back; `when_settled()`: `changed` is to be called then.
    `clock` in seconds, `clock_ms` since 2026-01-01."""

    def __init__(
        self,
        cluster: Cluster,
        leases: LeaseTable,
        tracing: Tracing,
        metrics: CoordinatorMetrics,
        answers: int,
        settled: Callable[[], bool],
        when_settled: Callable[[], None],
        clock: Callable[[], float],
        clock_ms: Callable[[], int],
    ) -> None:
        self._cluster, self._leases = cluster, leases
        self._tracing, self._metrics = tracing, metrics
        self._answers, self._settled, self._when_settled = answers, settled, when_settled
        self._clock, self._clock_ms = clock, clock_ms
        self._streams: dict[int, RouterStream] = {}
        self._tokens = itertools.count(1)
        self._served: tuple[Served, ...] = ()
        self._held = HeldSelects()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def held(self) -> int:
        """Requests that wait for instances to come back."""
        return len(self._held)

    def open(self, hello: _RouteHello) -> RouterStream:
        """A router has said Hello. Raises InvalidRequest, LeaseRefused, or NoCapacity while no ids are granted."""
        router_id, placements = wire_route.router_id_from_pb(hello), wire_route.open_from_pb(hello)
        token = next(self._tokens)
        lease = self._lease(token, router_id, hello)
        self._cluster.adopt(token, placements)
        outbox: Outbox[wire_route.RouteResponse] = Outbox(f"route stream of {router_id}", self._answers)
        stream = self._streams[token] = RouterStream(token, router_id, outbox)
        outbox.post(wire_route.route_welcome(lease))
        outbox.put_state("served", self._served_to_pb)
        extra = {"router_id": router_id, "open": len(placements)}
        logger.info("router joined with id bits %d/%d", lease.node_id, lease.process_id, extra=extra)
        return stream

    def close(self, stream: RouterStream) -> None:
        """The stream is over: everything that it held is released."""
        del self._streams[stream.token]
        self._held.drop_router(stream.token)
        self._leases.release(stream.token, self._clock())
        released = self._cluster.drop_router(stream.token)
        logger.info("router left, %d placements released", released, extra={"router_id": stream.router_id})

    def end_all(self, error: IsthmusError) -> None:
        """End every stream."""
        for stream in self._streams.values():
            stream.outbox.end(error)

    def hear(self, stream: RouterStream, message: _RouteRequest) -> None:
        """What a router says. Raises InvalidRequest."""
        match message.WhichOneof("body"):
            case "select":
                self._hear_select(stream, message.select)
            case "prefilled":
                self._cluster.prefilled(stream.token, wire_route.key_from_pb(message.prefilled.key, "prefilled.key"))
            case "finish":
                key = wire_route.key_from_pb(message.finish.key, "finish.key")
                if self._held.withdraw(stream.token, key):
                    # Every select gets an answer: a router counts them.
                    stream.outbox.post(wire_route.refusal_to_pb(message.finish.key, RequestCancelled()))
                # A router may finish what a broken stream has released before; then there is nothing to do.
                self._cluster.finish(stream.token, key)
            case other:
                raise unexpected(other, "send select, prefilled or finish after hello")

    def changed(self) -> None:
        """The cluster has changed, or has settled: place what waits, tell the routers what can be served."""
        served = self._cluster.served()
        if served != self._served:
            self._served = served
            logger.info("serving %s", ", ".join(one.name for one in served) or "nothing")
            for stream in self._streams.values():
                stream.outbox.put_state("served", self._served_to_pb)
        if len(self._held):
            self._held.retry(self._again)

    def _hear_select(self, stream: RouterStream, select: Select) -> None:
        now = time.time_ns()
        answer = self._select(stream.token, select, now)
        if answer is None:
            try:
                self._held.hold(stream.token, select, now)
            except IsthmusError as error:
                answer = wire_route.refusal_to_pb(select.key, error)
        if answer is not None:
            stream.outbox.post(answer)
        else:
            self._when_settled()

    def _again(self, token: int, select: Select, since_ns: int) -> bool:
        answer = self._select(token, select, since_ns)
        if answer is not None:
            self._streams[token].outbox.post(answer)
        return answer is not None

    def _lease(self, token: int, router_id: str, hello: _RouteHello) -> IdLease:
        """New bits, or the presented ones confirmed. What is left of a broken stream of this router ends."""
        now = self._clock()
        if not hello.HasField("lease"):
            return self._leases.grant(token, router_id, now, self._clock_ms())
        lease, old = self._leases.present(token, router_id, wire_route.lease_from_pb(hello.lease), now)
        if old is not None:
            self._cluster.drop_router(old)
            self._held.drop_router(old)
            self._streams[old].outbox.end(StreamReplaced(f"router {router_id}"))
        return lease

    def _select(self, token: int, select: Select, since_ns: int) -> wire_route.RouteResponse | None:
        """The answer; None when there may be a place in a moment. `since_ns`: when it was asked, for the span."""
        began, policy = self._clock(), self._cluster.policy.value
        try:
            choice = self._cluster.select(token, wire_route.question_from_pb(select))
        except IsthmusError as error:
            if isinstance(error, NoCapacity | UnknownModel) and not self._settled():
                return None
            self._span(select, since_ns).end(error=error.message)
            self._metrics.placed(policy, self._clock() - began, error)
            return wire_route.refusal_to_pb(select.key, error)
        span, placement = self._span(select, since_ns), choice.placement
        span.set("isthmus.candidates", choice.candidates)
        if placement.context is not None:
            span.set("isthmus.context_instance", placement.context.instance_id)
        span.set("isthmus.generation_instance", placement.generation.instance_id)
        span.end()
        self._metrics.placed(policy, self._clock() - began)
        return wire_route.selected_to_pb(select.key, choice, policy)

    def _span(self, select: Select, since_ns: int) -> Span:
        parent = wire_route.trace_from_pb(select)
        span = self._tracing.begin("coordinator.route", parent, kind="server", start_ns=since_ns)
        span.set("isthmus.model", select.model)
        span.set("isthmus.request_id", str(select.key.request_id))
        span.set("isthmus.policy", self._cluster.policy.value)
        return span

    def _served_to_pb(self) -> wire_route.RouteResponse:
        served = wire_route.served_to_pb(self._served, self._cluster.policy.wants_keys)
        return wire_route.RouteResponse(served=served)
