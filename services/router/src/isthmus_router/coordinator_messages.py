"""What a router and the coordinator tell each other: protobuf to values and back."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.v1 import common_pb2, coordinator_service_pb2

from isthmus_core.ids import IdLease
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext

Request = coordinator_service_pb2.RouteRequest
Response = coordinator_service_pb2.RouteResponse


class ProtocolError(Exception):
    """The coordinator said something that this build does not understand."""


@dataclass(frozen=True, slots=True)
class InstanceRef:
    """An instance as a placement names it: its stable id, this start of it, host:port of its hub."""

    instance_id: str
    incarnation: bytes
    endpoint: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `context` None: `generation` does everything."""

    context: InstanceRef | None
    generation: InstanceRef


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the cluster can serve now. `max_model_len`: prompt plus output in tokens."""

    name: str
    max_model_len: int


def hello_to_pb(router_id: str, lease: IdLease | None, placements: dict[RequestKey, Placement]) -> Request:
    """First message of a stream: who, the lease still held, the placements not finished."""
    hello = coordinator_service_pb2.RouteHello(router_id=router_id)
    if lease is not None:
        hello.lease.node_id, hello.lease.process_id, hello.lease.base_ms = (
            lease.node_id,
            lease.process_id,
            lease.base_ms,
        )
        hello.lease.ttl.FromNanoseconds(int(lease.ttl_s * 1e9))
    for key, placement in placements.items():
        one = hello.open.add(key=_key_to_pb(key), generation=_start_to_pb(placement.generation))
        if placement.context is not None:
            one.context.CopyFrom(_start_to_pb(placement.context))
    return Request(hello=hello)


def select_to_pb(
    key: RequestKey, model: str, prompt_tokens: int, max_tokens: int, trace: TraceContext | None
) -> Request:
    """Where should this request go?"""
    select = coordinator_service_pb2.Select(
        key=_key_to_pb(key), model=model, prompt_tokens=prompt_tokens, max_tokens=max_tokens
    )
    if trace is not None:
        select.trace.CopyFrom(
            common_pb2.TraceContext(trace_id=trace.trace_id, span_id=trace.span_id, flags=trace.flags)
        )
    return Request(select=select)


def finish_to_pb(key: RequestKey) -> Request:
    """It is over."""
    return Request(finish=coordinator_service_pb2.Finish(key=_key_to_pb(key)))


def lease_from_pb(pb: coordinator_service_pb2.IdLease) -> IdLease:
    """Raises ProtocolError when the lease can not be minted under."""
    ttl_s = pb.ttl.ToNanoseconds() / 1e9
    if pb.node_id >> 8 or pb.process_id >> 6 or pb.base_ms >> 39 or ttl_s <= 0:
        raise ProtocolError(f"it granted a lease that does not fit an id: {str(pb).strip()!r}")
    return IdLease(pb.node_id, pb.process_id, pb.base_ms, ttl_s)


def placement_from_pb(pb: coordinator_service_pb2.Selected) -> Placement:
    """Raises ProtocolError when an instance is incomplete."""
    return Placement(_ref_from_pb(pb.context) if pb.HasField("context") else None, _ref_from_pb(pb.generation))


def served_from_pb(pb: coordinator_service_pb2.ServedModels) -> tuple[ServedModel, ...]:
    """What the cluster can serve."""
    return tuple(ServedModel(model.name, model.max_model_len) for model in pb.models)


def key_from_pb(pb: common_pb2.RequestKey) -> RequestKey:
    """As it was sent."""
    return RequestKey(pb.request_id, pb.attempt)


def _key_to_pb(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def _start_to_pb(ref: InstanceRef) -> coordinator_service_pb2.InstanceStart:
    return coordinator_service_pb2.InstanceStart(instance_id=ref.instance_id, incarnation=ref.incarnation)


def _ref_from_pb(pb: coordinator_service_pb2.InstanceDescriptor) -> InstanceRef:
    if not pb.instance_id or not pb.endpoint or len(pb.incarnation) != 16:
        raise ProtocolError(f"it placed a request on an incomplete instance {pb.instance_id!r} at {pb.endpoint!r}")
    return InstanceRef(pb.instance_id, pb.incarnation, pb.endpoint)
