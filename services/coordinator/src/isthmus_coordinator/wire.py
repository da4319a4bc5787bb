"""The border: protobuf to values and back. Raises InvalidRequest naming the field."""

from __future__ import annotations

import re

from isthmus.v1 import common_pb2, coordinator_service_pb2, errors_pb2, worker_service_pb2

from isthmus_coordinator.cluster import MemberView, PairView
from isthmus_coordinator.membership import Instance, Load, Role, Start
from isthmus_coordinator.pairs import Incompatibility, Pair, PairState
from isthmus_coordinator.placement import Placement, Served
from isthmus_core.errors import InvalidRequest, IsthmusError
from isthmus_core.ids import IdLease, check_request_id
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext

# Version of the schema this build speaks; one version of difference either way works.
SCHEMA_VERSION = 1
INCARNATION_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,120}")
_ROUTER = re.compile(r"[!-~]{1,200}")
_ENDPOINT = re.compile(r"[!-~]{1,255}:[0-9]{1,5}")
_MAX_MODEL_NAME = 200

RegisterResponse = coordinator_service_pb2.RegisterResponse
RouteResponse = coordinator_service_pb2.RouteResponse


def _require(good: bool, field: str, value: object, remedy: str) -> None:
    if not good:
        raise InvalidRequest(field, str(value), remedy)


def instance_from_pb(pb: coordinator_service_pb2.InstanceDescriptor) -> Instance:
    """Every field is required."""
    known = [role.value for role in Role]
    _require(
        _NAME.fullmatch(pb.instance_id) is not None, "instance.instance_id", pb.instance_id, f"use {_NAME.pattern}"
    )
    _incarnation(pb.incarnation, "instance.incarnation")
    _require(_ENDPOINT.fullmatch(pb.endpoint) is not None, "instance.endpoint", pb.endpoint, "use host:port")
    _require(pb.role in known, "instance.role", pb.role, f"use one of {[role.name for role in Role]}")
    _require(0 < len(pb.model) <= _MAX_MODEL_NAME, "instance.model", pb.model, f"use 1 to {_MAX_MODEL_NAME} characters")
    for field in ("max_model_len", "tokens_per_block", "total_blocks"):
        _require(getattr(pb, field) > 0, f"instance.{field}", 0, "use a positive number")
    _require(
        abs(pb.schema_version - SCHEMA_VERSION) <= 1 and pb.schema_version > 0,
        "instance.schema_version",
        pb.schema_version,
        f"this coordinator speaks version {SCHEMA_VERSION}: use instances at most one version older or newer",
    )
    return Instance(
        instance_id=pb.instance_id,
        incarnation=pb.incarnation,
        endpoint=pb.endpoint,
        role=Role(pb.role),
        model=pb.model,
        max_model_len=pb.max_model_len,
        tokens_per_block=pb.tokens_per_block,
        engine=pb.engine,
        schema_version=pb.schema_version,
        total_blocks=pb.total_blocks,
    )


def _incarnation(value: bytes, field: str) -> bytes:
    _require(len(value) == INCARNATION_BYTES, field, value.hex(), f"use {INCARNATION_BYTES} bytes")
    return value


def load_from_pb(pb: worker_service_pb2.InstanceLoad) -> Load:
    """Any values."""
    return Load(
        running_requests=pb.running_requests,
        waiting_requests=pb.waiting_requests,
        held_handoffs=pb.held_handoffs,
        used_blocks=pb.used_blocks,
        total_blocks=pb.total_blocks,
        in_doubt_blocks=pb.in_doubt_blocks,
    )


def pair_from_pb(pb: coordinator_service_pb2.PairReport) -> tuple[Start, Pair]:
    """The start of the context instance that a report is about, and what it says."""
    known = [state.value for state in PairState]
    _require(pb.context_instance_id != "", "pair.context_instance_id", "", "name the context instance")
    _require(pb.state in known, "pair.state", pb.state, f"use one of {[state.name for state in PairState]}")
    start = Start(pb.context_instance_id, _incarnation(pb.context_incarnation, "pair.context_incarnation"))
    reasons = tuple(Incompatibility(one.field, one.mine, one.yours, one.remedy) for one in pb.incompatibilities)
    return start, Pair(PairState(pb.state), reasons)


def router_id_from_pb(pb: coordinator_service_pb2.RouteHello) -> str:
    """The router's name."""
    _require(_ROUTER.fullmatch(pb.router_id) is not None, "hello.router_id", pb.router_id, f"use {_ROUTER.pattern}")
    return pb.router_id


def lease_from_pb(pb: coordinator_service_pb2.IdLease) -> IdLease:
    """A presented lease, its bits unchecked."""
    return IdLease(pb.node_id, pb.process_id, pb.base_ms, pb.ttl.ToNanoseconds() / 1e9)


def open_from_pb(pb: coordinator_service_pb2.RouteHello) -> list[tuple[RequestKey, tuple[Start, ...]]]:
    """The placements that a router has not finished."""
    placements: list[tuple[RequestKey, tuple[Start, ...]]] = []
    for one in pb.open:
        _require(one.HasField("generation"), "hello.open.generation", "", "name the instance")
        legs = [one.context, one.generation] if one.HasField("context") else [one.generation]
        starts = tuple(Start(leg.instance_id, _incarnation(leg.incarnation, "hello.open.incarnation")) for leg in legs)
        placements.append((key_from_pb(one.key, "hello.open.key"), starts))
    return placements


def key_from_pb(pb: common_pb2.RequestKey, field: str = "key") -> RequestKey:
    """A key with an id of the global space."""
    check_request_id(pb.request_id, f"{field}.request_id")
    return RequestKey(pb.request_id, pb.attempt)


def trace_from_pb(pb: coordinator_service_pb2.Select) -> TraceContext | None:
    """Parent of the decision's span; None when there is none or it is malformed (as W3C wants)."""
    trace = pb.trace
    if len(trace.trace_id) != 16 or len(trace.span_id) != 8:
        return None
    return TraceContext(trace.trace_id, trace.span_id, trace.flags)


def instance_to_pb(instance: Instance) -> coordinator_service_pb2.InstanceDescriptor:
    """As routers and tools see it."""
    return coordinator_service_pb2.InstanceDescriptor(
        instance_id=instance.instance_id,
        incarnation=instance.incarnation,
        endpoint=instance.endpoint,
        role=common_pb2.InstanceRole.Name(instance.role.value),
        model=instance.model,
        max_model_len=instance.max_model_len,
        tokens_per_block=instance.tokens_per_block,
        engine=instance.engine,
        schema_version=instance.schema_version,
        total_blocks=instance.total_blocks,
    )


def register_welcome() -> RegisterResponse:
    """Answer to an instance's Hello."""
    return RegisterResponse(welcome=coordinator_service_pb2.RegisterWelcome(schema_version=SCHEMA_VERSION))


def peers_to_pb(peers: tuple[Instance, ...]) -> RegisterResponse:
    """The complete list of context instances."""
    return RegisterResponse(
        peers=coordinator_service_pb2.PeerSet(context_instances=[instance_to_pb(peer) for peer in peers])
    )


def route_welcome(lease: IdLease) -> RouteResponse:
    """Answer to a router's Hello."""
    pb = coordinator_service_pb2.IdLease(node_id=lease.node_id, process_id=lease.process_id, base_ms=lease.base_ms)
    pb.ttl.FromNanoseconds(int(lease.ttl_s * 1e9))
    return RouteResponse(welcome=coordinator_service_pb2.RouteWelcome(lease=pb))


def selected_to_pb(key: common_pb2.RequestKey, placement: Placement) -> RouteResponse:
    """Where the request goes."""
    selected = coordinator_service_pb2.Selected(key=key, generation=instance_to_pb(placement.generation))
    if placement.context is not None:
        selected.context.CopyFrom(instance_to_pb(placement.context))
    return RouteResponse(selected=selected)


def refusal_to_pb(key: common_pb2.RequestKey, error: IsthmusError) -> RouteResponse:
    """Why it goes nowhere."""
    return RouteResponse(select_failed=coordinator_service_pb2.SelectFailed(key=key, status=error.serialize()))


def _models_to_pb(served: tuple[Served, ...]) -> list[coordinator_service_pb2.ServedModel]:
    return [coordinator_service_pb2.ServedModel(name=one.name, max_model_len=one.max_model_len) for one in served]


def served_to_pb(served: tuple[Served, ...]) -> RouteResponse:
    """What the cluster can serve."""
    return RouteResponse(served=coordinator_service_pb2.ServedModels(models=_models_to_pb(served)))


def cluster_to_pb(
    members: tuple[MemberView, ...], pairs: tuple[PairView, ...], served: tuple[Served, ...], open_requests: int
) -> coordinator_service_pb2.GetClusterResponse:
    """Everything, for people and tools."""
    return coordinator_service_pb2.GetClusterResponse(
        members=[_member_to_pb(member) for member in members],
        pairs=[_pair_to_pb(pair) for pair in pairs],
        models=_models_to_pb(served),
        open_requests=open_requests,
    )


def _member_to_pb(member: MemberView) -> coordinator_service_pb2.ClusterMember:
    load = member.load
    return coordinator_service_pb2.ClusterMember(
        instance=instance_to_pb(member.instance),
        load=worker_service_pb2.InstanceLoad(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            held_handoffs=load.held_handoffs,
            used_blocks=load.used_blocks,
            total_blocks=load.total_blocks,
            in_doubt_blocks=load.in_doubt_blocks,
        ),
        draining=member.draining,
        open_requests=member.open_requests,
    )


def _pair_to_pb(view: PairView) -> coordinator_service_pb2.ClusterPair:
    return coordinator_service_pb2.ClusterPair(
        context_instance_id=view.context_id,
        generation_instance_id=view.generation_id,
        state=coordinator_service_pb2.PairState.Name(view.pair.state.value),
        incompatibilities=[
            errors_pb2.Incompatibility(field=one.field, mine=one.mine, yours=one.yours, remedy=one.remedy)
            for one in view.pair.incompatibilities
        ],
    )
