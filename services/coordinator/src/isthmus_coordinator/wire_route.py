"""The border of the Route stream: protobuf to values and back. Raises InvalidRequest naming the field."""

from __future__ import annotations

import re

from isthmus.v1 import common_pb2, coordinator_service_pb2

from isthmus_coordinator.costs import Kind
from isthmus_coordinator.load import LegLoad
from isthmus_coordinator.membership import Start
from isthmus_coordinator.placement import Choice, Question, Served
from isthmus_coordinator.wire import incarnation_from_pb, instance_to_pb, keying_to_pb, require
from isthmus_core.block_keys import KEY_BYTES
from isthmus_core.errors import IsthmusError
from isthmus_core.ids import IdLease, check_request_id
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext

RouteResponse = coordinator_service_pb2.RouteResponse
ROUTER = re.compile(r"[!-~]{1,200}")


def router_id_from_pb(pb: coordinator_service_pb2.RouteHello) -> str:
    """The router's name."""
    require(ROUTER.fullmatch(pb.router_id) is not None, "hello.router_id", pb.router_id, f"use {ROUTER.pattern}")
    return pb.router_id


def lease_from_pb(pb: coordinator_service_pb2.IdLease) -> IdLease:
    """A presented lease, its bits unchecked."""
    return IdLease(pb.node_id, pb.process_id, pb.base_ms, pb.ttl.ToNanoseconds() / 1e9)


def open_from_pb(pb: coordinator_service_pb2.RouteHello) -> list[tuple[RequestKey, tuple[LegLoad, ...]]]:
    """The placements that a router has not finished."""
    placements: list[tuple[RequestKey, tuple[LegLoad, ...]]] = []
    for one in pb.open:
        require(one.HasField("generation"), "hello.open.generation", "", "name the instance")
        legs = [one.context, one.generation] if one.HasField("context") else [one.generation]
        starts = tuple(
            Start(leg.instance_id, incarnation_from_pb(leg.incarnation, "hello.open.incarnation")) for leg in legs
        )
        loads = tuple(LegLoad(leg, 0 if index else one.prefill_tokens, one.tokens) for index, leg in enumerate(starts))
        placements.append((key_from_pb(one.key, "hello.open.key"), loads))
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


def route_welcome(lease: IdLease) -> RouteResponse:
    """Answer to a router's Hello."""
    pb = coordinator_service_pb2.IdLease(node_id=lease.node_id, process_id=lease.process_id, base_ms=lease.base_ms)
    pb.ttl.FromNanoseconds(int(lease.ttl_s * 1e9))
    return RouteResponse(welcome=coordinator_service_pb2.RouteWelcome(lease=pb))


def question_from_pb(pb: coordinator_service_pb2.Select) -> Question:
    """What a router asks."""
    known = [kind.value for kind in Kind]
    for kind in pb.kinds:
        require(kind in known, "select.kinds", kind, f"use {[kind.name for kind in Kind]}")
    for one in pb.prompt_keys:
        require(len(one.keys) % KEY_BYTES == 0, "select.prompt_keys", f"{len(one.keys)} bytes", "use 16-byte keys")
    return Question(
        key=key_from_pb(pb.key, "select.key"),
        model=pb.model,
        prompt_tokens=pb.prompt_tokens,
        max_tokens=pb.max_tokens,
        keys={one.keying_id: one.keys for one in pb.prompt_keys},
        affinity=pb.affinity_key,
        kinds=frozenset(Kind(kind) for kind in pb.kinds),
        excluded=frozenset(pb.excluded_incarnations),
        local_tokens=pb.local_prefill_tokens,
    )


def selected_to_pb(key: common_pb2.RequestKey, choice: Choice, policy: str) -> RouteResponse:
    """Where the request goes, and why."""
    context, generation, pick = choice.placement.context, choice.placement.generation, choice.pick
    selected = coordinator_service_pb2.Selected(
        key=key,
        generation=instance_to_pb(generation),
        kind=coordinator_service_pb2.PlacementKind.Name(pick.kind.value),
        context_cached_tokens=choice.context_cached,
        generation_cached_tokens=choice.generation_cached,
        policy=policy,
        candidates=choice.candidates,
    )
    if context is not None:
        selected.context.CopyFrom(instance_to_pb(context))
    selected.scores.add(
        context_instance_id="" if context is None else context.instance_id,
        generation_instance_id=generation.instance_id,
        score=pick.reuse - pick.load - pick.transfer,
        reuse=pick.reuse,
        load=pick.load,
        transfer=pick.transfer,
    )
    if choice.transfer_s is not None:
        selected.expected_transfer.FromNanoseconds(int(choice.transfer_s * 1e9))
    return RouteResponse(selected=selected)


def refusal_to_pb(key: common_pb2.RequestKey, error: IsthmusError) -> RouteResponse:
    """Why it goes nowhere."""
    return RouteResponse(select_failed=coordinator_service_pb2.SelectFailed(key=key, status=error.serialize()))


def models_to_pb(served: tuple[Served, ...]) -> list[coordinator_service_pb2.ServedModel]:
    """Models that can be served."""
    return [
        coordinator_service_pb2.ServedModel(
            name=one.name, max_model_len=one.max_model_len, keyings=[keying_to_pb(keying) for keying in one.keyings]
        )
        for one in served
    ]


def served_to_pb(served: tuple[Served, ...], wants_keys: bool) -> coordinator_service_pb2.ServedModels:
    """What the cluster can serve, and whether the policy looks at what is cached."""
    return coordinator_service_pb2.ServedModels(models=models_to_pb(served), wants_prompt_keys=wants_keys)
