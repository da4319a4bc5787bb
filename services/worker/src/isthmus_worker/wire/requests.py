"""A leg of a request, as the router sends it and as the engine process gets it."""

from __future__ import annotations

from dataclasses import replace

from isthmus.v1 import common_pb2, engine_ipc_pb2, generation_pb2, worker_service_pb2

from isthmus_core import token_ids
from isthmus_core.errors import InvalidRequest
from isthmus_core.generation import chunk_from_pb, sampling_from_pb, sampling_to_pb
from isthmus_core.ids import check_request_id
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext
from isthmus_worker.engine import ContextPhase, EngineRequest, RequestType, Tokens
from isthmus_worker.wire.tokens import chunks_to_pb
from kvtransfer.ports import Holder
from kvtransfer.rank_info import INCARNATION_BYTES
from kvtransfer.wire import trace_to_pb

MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
# Of the context leg, over all answers.
MAX_FIRST_TOKENS = 128
MAX_NAME = 256
MAX_SALT = 256


def key_to_pb(key: RequestKey) -> common_pb2.RequestKey:
    """Any key."""
    return common_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def key_from_pb(pb: common_pb2.RequestKey, field: str = "key") -> RequestKey:
    """Raises InvalidRequest when the id lies outside [2^40, 2^63)."""
    check_request_id(pb.request_id, f"{field}.request_id")
    return RequestKey(pb.request_id, pb.attempt)


def request_from_pb(pb: worker_service_pb2.WorkerServiceGenerateRequest, trace: TraceContext | None) -> EngineRequest:
    """One leg. Raises InvalidRequest naming the field, its value and what would be accepted."""
    key = key_from_pb(pb.key)
    try:
        request_type = RequestType(int(pb.request_type))
    except ValueError:
        known = ", ".join(one.name for one in RequestType)
        raise InvalidRequest("request_type", str(int(pb.request_type)), f"use one of {known}") from None
    prompt = _tokens(pb.prompt, "prompt")
    if not prompt:
        raise InvalidRequest("prompt", "empty", "send at least one token")
    if pb.sampling.max_tokens < 1:
        raise InvalidRequest("sampling.max_tokens", str(pb.sampling.max_tokens), "use at least 1")
    _limit("sampling.stop_token_ids", len(pb.sampling.stop_token_ids), MAX_STOP_TOKENS)
    _limit("sampling.logit_bias", len(pb.sampling.logit_bias), MAX_LOGIT_BIAS)
    sampling = sampling_from_pb(pb.sampling)
    if len(pb.cache_salt) > MAX_SALT:
        raise InvalidRequest("cache_salt", f"{len(pb.cache_salt)} bytes", f"at most {MAX_SALT} are accepted")
    if len(pb.adapter) > MAX_NAME:
        raise InvalidRequest("adapter", f"{len(pb.adapter)} characters", f"at most {MAX_NAME} are accepted")
    _check_partner(pb, request_type)
    phase = _context_phase(pb.context_phase, key, len(prompt)) if pb.HasField("context_phase") else None
    context = _holder(pb.context_instance, "context_instance") if pb.HasField("context_instance") else None
    return EngineRequest(
        key,
        request_type,
        prompt,
        sampling,
        phase,
        trace,
        pb.cache_salt,
        context,
        pb.generation_waits,
        pb.may_take_over,
        pb.adapter,
    )


def _check_partner(pb: worker_service_pb2.WorkerServiceGenerateRequest, request_type: RequestType) -> None:
    """What a leg is told about the other one must fit its type."""
    done, at_once = pb.HasField("context_phase"), pb.HasField("context_instance")
    if request_type is not RequestType.GENERATION_ONLY:
        for name, given in (("context_phase", done), ("context_instance", at_once)):
            if given:
                raise InvalidRequest(name, "present", f"leave it out ({request_type.name})")
    elif done and at_once:
        raise InvalidRequest("context_instance", "present", "leave it out when context_phase is there")
    elif not done and not at_once:
        remedy = "send what the context leg answered, or context_instance when it was started at the same time"
        raise InvalidRequest("context_phase", "absent", f"{remedy} ({request_type.name})")
    if pb.may_take_over and not at_once:
        raise InvalidRequest("may_take_over", "true", "leave it out without context_instance")
    if pb.generation_waits and request_type is not RequestType.CONTEXT_ONLY:
        raise InvalidRequest("generation_waits", "true", f"leave it out ({request_type.name})")


def _context_phase(pb: generation_pb2.ContextPhaseParams, key: RequestKey, prompt_tokens: int) -> ContextPhase:
    field = "context_phase"
    held = key_from_pb(pb.key, f"{field}.key")
    if held != key:
        raise InvalidRequest(f"{field}.key", str(held), f"both legs must have one key, this one is {key}")
    first = _first_tokens(pb, f"{field}.first_tokens")
    if pb.prompt_tokens != prompt_tokens:
        remedy = f"must be the length of the prompt, {prompt_tokens}"
        raise InvalidRequest(f"{field}.prompt_tokens", str(pb.prompt_tokens), remedy)
    return ContextPhase(held, first, prompt_tokens, replace(_holder(pb, field), dp_rank=pb.dp_rank))


def _holder(pb: generation_pb2.ContextPhaseParams | generation_pb2.ContextInstance, field: str) -> Holder:
    for name, value in (("endpoint", pb.endpoint), ("instance_id", pb.instance_id)):
        if not 0 < len(value) <= MAX_NAME:
            raise InvalidRequest(f"{field}.{name}", value, f"send 1 to {MAX_NAME} characters")
    if len(pb.incarnation) != INCARNATION_BYTES:
        raise InvalidRequest(f"{field}.incarnation", pb.incarnation.hex(), f"send {INCARNATION_BYTES} bytes")
    return Holder(pb.endpoint, pb.instance_id, pb.incarnation)


def _first_tokens(pb: generation_pb2.ContextPhaseParams, field: str) -> tuple[Tokens, ...]:
    if not pb.first_tokens:
        raise InvalidRequest(field, "empty", "send the tokens of the context leg")
    _limit(field, sum(len(one.tokens.le_uint32) // 4 or 1 for one in pb.first_tokens), MAX_FIRST_TOKENS)
    try:
        return tuple(chunk_from_pb(one) for one in pb.first_tokens)
    except ValueError as error:
        raise InvalidRequest(field, str(error), "send what the context leg answered") from error


def _tokens(pb: common_pb2.TokenIds, field: str) -> tuple[int, ...]:
    try:
        return token_ids.unpack(pb.le_uint32)
    except ValueError as error:
        raise InvalidRequest(field, f"{len(pb.le_uint32)} bytes", "send 4 bytes a token") from error


def _limit(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(field, f"{count} entries", f"at most {limit} are accepted")


def submit_to_pb(request: EngineRequest) -> engine_ipc_pb2.SubmitCommand:
    """For the engine process."""
    phase, context = request.context_phase, request.context
    return engine_ipc_pb2.SubmitCommand(
        key=key_to_pb(request.key),
        request_type=worker_service_pb2.RequestType.Name(request.request_type.value),
        prompt=common_pb2.TokenIds(le_uint32=token_ids.pack(request.prompt)),
        sampling=sampling_to_pb(request.sampling),
        context_phase=None if phase is None else context_phase_to_pb(phase),
        trace=trace_to_pb(request.trace),
        cache_salt=request.cache_salt,
        context_instance=None if context is None else _context_instance_to_pb(context),
        generation_waits=request.generation_waits,
        may_take_over=request.may_take_over,
        adapter=request.adapter,
    )


def _context_instance_to_pb(holder: Holder) -> generation_pb2.ContextInstance:
    return generation_pb2.ContextInstance(
        endpoint=holder.endpoint, instance_id=holder.instance_id, incarnation=holder.incarnation
    )


def context_phase_to_pb(phase: ContextPhase) -> generation_pb2.ContextPhaseParams:
    """For the router and the engine process."""
    return generation_pb2.ContextPhaseParams(
        key=key_to_pb(phase.key),
        first_tokens=chunks_to_pb(phase.first_tokens),
        prompt_tokens=phase.prompt_tokens,
        endpoint=phase.holder.endpoint,
        instance_id=phase.holder.instance_id,
        incarnation=phase.holder.incarnation,
        dp_rank=phase.holder.dp_rank,
    )
