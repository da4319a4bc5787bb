"""Messages of `WorkerService` to and from the router's own types. Nothing else of the router reads them."""

from __future__ import annotations

from isthmus.v1 import common_pb2, generation_pb2, worker_service_pb2

from isthmus_core.errors import InternalError
from isthmus_core.generation import chunk_from_pb, sampling_to_pb
from isthmus_core.keys import RequestKey
from isthmus_router.ports import (
    ContextReady,
    Finished,
    InstanceRef,
    Leg,
    LegEvent,
    LegKind,
    Sampling,
    Tokens,
    TookOver,
)


def to_key(key: RequestKey) -> common_pb2.RequestKey:
    """Message of a key."""
    return common_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def to_request(leg: Leg, gather_s: float = 0.0) -> worker_service_pb2.WorkerServiceGenerateRequest:
    """Message that asks a worker for a leg. `gather_s`: tokens may wait so long to come together."""
    return worker_service_pb2.WorkerServiceGenerateRequest(
        key=to_key(leg.key),
        request_type=worker_service_pb2.RequestType.Name(leg.kind.value),
        prompt=common_pb2.TokenIds(le_uint32=leg.prompt),
        sampling=sampling_to_pb(leg.sampling),
        context_phase=leg.context_phase,
        cache_salt=leg.cache_salt,
        adapter=leg.adapter,
        context_instance=None if leg.context is None else _instance(leg.context),
        generation_waits=leg.generation_waits,
        gather_us=round(gather_s * 1e6),
        may_take_over=leg.context is not None,
    )


def _instance(instance: InstanceRef) -> generation_pb2.ContextInstance:
    return generation_pb2.ContextInstance(
        endpoint=instance.endpoint, instance_id=instance.instance_id, incarnation=instance.incarnation
    )


def to_event(
    response: worker_service_pb2.WorkerServiceGenerateResponse, leg: Leg, instance: InstanceRef
) -> LegEvent | TookOver:
    """The event in a worker's message. Raises InternalError when the worker breaks the protocol."""
    kind = response.WhichOneof("event")
    try:
        if kind == "tokens":
            return _tokens(response.tokens, leg.sampling)
        if kind == "context_ready" and leg.kind is LegKind.CONTEXT:
            ready = response.context_ready
            first = tuple(_tokens(chunk, leg.sampling) for chunk in ready.params.first_tokens)
            return ContextReady(first, ready.params, ready.report)
        if kind == "took_over" and leg.context is not None:
            return TookOver(response.took_over.reason)
        if kind == "finished":
            return Finished(response.finished.report)
    except ValueError as error:
        raise InternalError(f"instance {instance.instance_id} sent a broken {kind}: {error}") from error
    raise InternalError(f"instance {instance.instance_id} sent {kind or 'an unknown event'} in a {leg.kind.name} leg")


def _tokens(chunk: generation_pb2.TokenChunk, sampling: Sampling) -> Tokens:
    """Raises ValueError for a chunk that does not belong to the request."""
    tokens = chunk_from_pb(chunk)
    if tokens.sample >= sampling.n:
        raise ValueError(f"answer {tokens.sample} of {sampling.n}")
    expected = 0 if sampling.logprobs is None else len(tokens.ids)
    if len(tokens.logprobs) != expected:
        raise ValueError(f"{len(tokens.logprobs)} log probabilities for {len(tokens.ids)} tokens, {expected} expected")
    return tokens
