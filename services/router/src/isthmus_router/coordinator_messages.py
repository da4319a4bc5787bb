"""What a router and the coordinator tell each other: protobuf to values and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.v1 import common_pb2, coordinator_service_pb2, kv_index_pb2

from isthmus_core.block_keys import Keying
from isthmus_core.ids import IdLease
from isthmus_core.keys import RequestKey
from isthmus_router.ports import PlacementRequest, Shape
from isthmus_router.prompt_keys import prompt_keys

Request = coordinator_service_pb2.RouteRequest
Response = coordinator_service_pb2.RouteResponse

_KINDS = {
    Shape.ANY: (),
    Shape.SPLIT: (coordinator_service_pb2.PLACEMENT_KIND_SPLIT,),
    Shape.UNSPLIT: (coordinator_service_pb2.PLACEMENT_KIND_UNSPLIT,),
}


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
    """Where a request goes. `context` None: `generation` does everything, alone of its kind (`unsplit`) or because
    little of the prompt is left to compute (`local_prefill`).

    `reuse_tokens`: prompt tokens believed to be cached where the prompt is computed, `generation_reuse_tokens`: at the
    generation instance. `score`, in prompt tokens: what speaks for the placement less what speaks against it.
    `transfer_s`: seconds that the hand-off is expected to take, None when nothing is known.
    """

    context: InstanceRef | None
    generation: InstanceRef
    kind: str = "split"
    policy: str = ""
    candidates: int = 0
    reuse_tokens: int = 0
    generation_reuse_tokens: int = 0
    score: float = 0.0
    transfer_s: float | None = None

    def describe(self) -> dict[str, str | int | float]:
        """Span attributes."""
        about: dict[str, str | int | float] = {
            "isthmus.placement.kind": self.kind,
            "isthmus.placement.policy": self.policy,
            "isthmus.placement.candidates": self.candidates,
            "isthmus.placement.reuse_tokens": self.reuse_tokens,
            "isthmus.placement.generation_reuse_tokens": self.generation_reuse_tokens,
            "isthmus.placement.score": self.score,
        }
        if self.transfer_s is not None:
            about["isthmus.placement.transfer_s"] = self.transfer_s
        return about


@dataclass(frozen=True, slots=True)
class OpenPlacement:
    """A placement that has not been finished. `prefill_tokens`: prompt tokens still to be computed; `tokens`: prompt
    and output."""

    placement: Placement
    prefill_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the cluster can serve now. `max_model_len`: prompt plus output in tokens. `keyings`: how its blocks
    are named."""

    name: str
    max_model_len: int
    keyings: tuple[Keying, ...] = ()


def hello_to_pb(router_id: str, lease: IdLease | None, placements: dict[RequestKey, OpenPlacement]) -> Request:
    """First message of a stream: who, the lease still held, the placements not finished."""
    hello = coordinator_service_pb2.RouteHello(router_id=router_id)
    if lease is not None:
        hello.lease.node_id, hello.lease.process_id, hello.lease.base_ms = (
            lease.node_id,
            lease.process_id,
            lease.base_ms,
        )
        hello.lease.ttl.FromNanoseconds(int(lease.ttl_s * 1e9))
    for key, held in placements.items():
        one = hello.open.add(
            key=_key_to_pb(key),
            generation=_start_to_pb(held.placement.generation),
            prefill_tokens=held.prefill_tokens,
            tokens=held.tokens,
        )
        if held.placement.context is not None:
            one.context.CopyFrom(_start_to_pb(held.placement.context))
    return Request(hello=hello)


def select_to_pb(question: PlacementRequest, keyings: Sequence[Keying] = ()) -> Request:
    """Where should this request go? `keyings`: how the coordinator wants to hear of the prompt's blocks."""
    trace = question.trace
    select = coordinator_service_pb2.Select(
        key=_key_to_pb(question.key),
        model=question.model,
        prompt_tokens=question.prompt_tokens,
        max_tokens=question.max_tokens,
        prompt_keys=prompt_keys(keyings, question.prompt, question.cache_salt, question.adapter),
        affinity_key=question.affinity,
        kinds=_KINDS[question.shape],
        excluded_incarnations=question.excluded,
        local_prefill_tokens=question.local_prefill_tokens,
    )
    if trace is not None:
        select.trace.CopyFrom(
            common_pb2.TraceContext(trace_id=trace.trace_id, span_id=trace.span_id, flags=trace.flags)
        )
    return Request(select=select)


def finish_to_pb(key: RequestKey) -> Request:
    """It is over."""
    return Request(finish=coordinator_service_pb2.Finish(key=_key_to_pb(key)))


def prefilled_to_pb(key: RequestKey) -> Request:
    """Its prompt has been computed."""
    return Request(prefilled=coordinator_service_pb2.Prefilled(key=_key_to_pb(key)))


def lease_from_pb(pb: coordinator_service_pb2.IdLease) -> IdLease:
    """Raises ProtocolError when the lease can not be minted under."""
    ttl_s = pb.ttl.ToNanoseconds() / 1e9
    if pb.node_id >> 8 or pb.process_id >> 6 or pb.base_ms >> 39 or ttl_s <= 0:
        raise ProtocolError(f"it granted a lease that does not fit an id: {str(pb).strip()!r}")
    return IdLease(pb.node_id, pb.process_id, pb.base_ms, ttl_s)


def placement_from_pb(pb: coordinator_service_pb2.Selected) -> Placement:
    """Raises ProtocolError when an instance is incomplete."""
    kind = coordinator_service_pb2.PlacementKind.Name(pb.kind).removeprefix("PLACEMENT_KIND_").lower()
    return Placement(
        _ref_from_pb(pb.context) if pb.HasField("context") else None,
        _ref_from_pb(pb.generation),
        kind=kind if pb.kind else "split" if pb.HasField("context") else "unsplit",
        policy=pb.policy,
        candidates=pb.candidates,
        reuse_tokens=pb.context_cached_tokens,
        generation_reuse_tokens=pb.generation_cached_tokens,
        score=pb.scores[0].score if pb.scores else 0.0,
        transfer_s=pb.expected_transfer.ToNanoseconds() / 1e9 if pb.HasField("expected_transfer") else None,
    )


def served_from_pb(pb: coordinator_service_pb2.ServedModels) -> tuple[ServedModel, ...]:
    """What the cluster can serve."""
    return tuple(
        ServedModel(model.name, model.max_model_len, tuple(_keying_from_pb(one) for one in model.keyings))
        for model in pb.models
    )


def _keying_from_pb(pb: kv_index_pb2.BlockKeying) -> Keying:
    if not pb.tokens_per_block:
        raise ProtocolError("it serves a model with blocks of no tokens")
    return Keying(pb.weights_digest, pb.attention_digest, pb.kv_dtype, pb.tokens_per_block)


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
