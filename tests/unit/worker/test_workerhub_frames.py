"""Everything that a request and its answers carry, over the gRPC messages and the frames of the engine process."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from isthmus.v1 import worker_service_pb2

from isthmus_core.errors import InvalidRequest
from isthmus_core.framing import FrameError
from isthmus_core.generation import chunk_from_pb, sampling_to_pb
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import (
    ContextPhase,
    ContextReady,
    EngineRequest,
    Finished,
    FinishReason,
    KvEvent,
    LegReport,
    RequestType,
    Sampling,
    TokenLogprobs,
    Tokens,
)
from isthmus_worker.engine_process.frames import commands_from_bytes, events_to_bytes
from isthmus_worker.scheduler import ContextDone, RequestFinished, RequestTokens
from isthmus_worker.wire.engine_frames import LegEnded, LegTokens, commands_to_bytes, events_from_bytes
from isthmus_worker.wire.requests import MAX_SALT, context_phase_to_pb, request_from_pb
from isthmus_worker.wire.responses import event_to_pb
from kvtransfer.ports import Holder

KEY = RequestKey(1 << 40, 3)
HOLDER = Holder("127.0.0.1:1", "context-0", b"i" * 16)
FLOAT = st.floats(0, 100, width=32)
TOKEN = st.integers(0, (1 << 32) - 1)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(1, 1 << 20),
    stop_token_ids=st.lists(TOKEN, max_size=5).map(tuple),
    min_tokens=st.integers(0, 100),
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=st.integers(0, 1 << 20),
    min_p=FLOAT,
    seed=st.integers(0, (1 << 64) - 1),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    repetition_penalty=FLOAT,
    logit_bias=st.lists(st.tuples(TOKEN, st.floats(-100, 100, width=32)), max_size=4).map(tuple),
    n=st.integers(1, 16),
    logprobs=st.none() | st.integers(0, 20),
)
LOGPROB = st.floats(-1000, 0, width=32)
LOGPROBS = st.builds(TokenLogprobs, LOGPROB, st.lists(st.tuples(TOKEN, LOGPROB), max_size=4).map(tuple))


@st.composite
def chunks(draw: st.DrawFn) -> Tokens:
    """New tokens of one answer, with log probabilities or without."""
    ids = tuple(draw(st.lists(TOKEN, min_size=1, max_size=4)))
    some = tuple(draw(LOGPROBS) for _ in ids) if draw(st.booleans()) else ()
    return Tokens(ids, draw(st.integers(0, 15)), some, draw(st.none() | st.sampled_from(FinishReason)))


@given(sampling=SAMPLINGS, first=st.lists(chunks(), min_size=1, max_size=4), salt=st.binary(max_size=MAX_SALT))
def test_a_request_reaches_the_engine_as_the_router_sent_it(sampling: Sampling, first: list[Tokens], salt: bytes):
    phase = ContextPhase(KEY, tuple(first), 2, HOLDER)
    request = EngineRequest(KEY, RequestType.GENERATION_ONLY, (65, 66), sampling, phase, cache_salt=salt)
    pb = worker_service_pb2.WorkerServiceGenerateRequest(
        request_type=worker_service_pb2.REQUEST_TYPE_GENERATION_ONLY,
        sampling=sampling_to_pb(sampling),
        context_phase=context_phase_to_pb(phase),
        cache_salt=salt,
    )
    pb.key.request_id, pb.key.attempt = KEY.request_id, KEY.attempt
    pb.prompt.le_uint32 = np.array([65, 66], "<u4").tobytes()
    assert request_from_pb(pb, None) == request
    assert commands_from_bytes(commands_to_bytes([request])) == [request]


@given(chunk=chunks())
def test_tokens_reach_the_router_as_the_engine_made_them(chunk: Tokens):
    (event,) = events_from_bytes(events_to_bytes([RequestTokens(KEY, chunk)]))
    assert event == LegTokens(KEY, chunk)
    request = EngineRequest(KEY, RequestType.CONTEXT_AND_GENERATION, (65,), Sampling(1))
    assert chunk_from_pb(event_to_pb(chunk, request, HOLDER).tokens) == chunk


@given(first=st.lists(chunks(), min_size=1, max_size=4), cached=st.integers(0, 1 << 20))
def test_ends_reach_the_router_as_the_engine_made_them(first: list[Tokens], cached: int):
    report = LegReport(
        context_queue=0.0,
        prefill=1.5,
        decode_tokens=7,
        cached_tokens=cached,
        handoff_failures=("late",),
        recomputed=True,
    )
    done, finished = ContextDone(KEY, tuple(first), report), RequestFinished(KEY, None, report)
    told = events_from_bytes(events_to_bytes([done, finished]))
    assert told == [LegEnded(KEY, ContextReady(tuple(first), report), report), LegEnded(KEY, Finished(report), report)]
    request = EngineRequest(KEY, RequestType.CONTEXT_ONLY, (65,), Sampling(1))
    ready = event_to_pb(ContextReady(tuple(first), report), request, HOLDER).context_ready
    assert tuple(chunk_from_pb(one) for one in ready.params.first_tokens) == tuple(first)
    assert ready.report.cached_tokens == cached


def test_keys_of_the_prefix_cache_reach_the_hub():
    event = KvEvent(stored=(b"a" * 16, b"b" * 16), removed=(b"c" * 16,))
    assert events_from_bytes(events_to_bytes([event])) == [event]


def test_absent_fields_of_a_request_are_their_defaults():
    pb = worker_service_pb2.WorkerServiceGenerateRequest(
        request_type=worker_service_pb2.REQUEST_TYPE_CONTEXT_AND_GENERATION
    )
    pb.key.request_id = KEY.request_id
    pb.prompt.le_uint32 = b"A\0\0\0"
    pb.sampling.max_tokens = 5
    assert request_from_pb(pb, None).sampling == Sampling(5)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda pb: pb.sampling.logit_bias.extend([pb.sampling.logit_bias.add()] * 1024), "sampling.logit_bias"),
        (lambda pb: setattr(pb, "cache_salt", b"s" * (MAX_SALT + 1)), "cache_salt"),
        (lambda pb: pb.context_phase.first_tokens[0].logprobs.add(), "context_phase.first_tokens"),
        (lambda pb: setattr(pb.context_phase.first_tokens[0], "finish_reason", 99), "context_phase.first_tokens"),
        (lambda pb: setattr(pb.context_phase.first_tokens[0].tokens, "le_uint32", b"x"), "context_phase.first_tokens"),
        (lambda pb: pb.context_phase.first_tokens.extend(pb.context_phase.first_tokens[:1] * 128), "first_tokens"),
    ],
)
def test_what_can_not_be_read_is_refused_naming_its_field(spoil, field: str):
    phase = ContextPhase(KEY, (Tokens((65, 66)),), 1, HOLDER)
    pb = worker_service_pb2.WorkerServiceGenerateRequest(
        request_type=worker_service_pb2.REQUEST_TYPE_GENERATION_ONLY,
        sampling=sampling_to_pb(Sampling(5)),
        context_phase=context_phase_to_pb(phase),
    )
    pb.key.request_id, pb.key.attempt = KEY.request_id, KEY.attempt
    pb.prompt.le_uint32 = b"A\0\0\0"
    request_from_pb(pb, None)
    spoil(pb)
    with pytest.raises(InvalidRequest) as caught:
        request_from_pb(pb, None)
    assert caught.value.field.endswith(field)


def test_a_frame_with_an_unknown_reason_is_malformed():
    frame = events_to_bytes([RequestTokens(KEY, Tokens((1,), reason=FinishReason.STOP))])
    # The last field of the chunk: finish_reason = 4, a varint.
    assert frame.count(b"\x20\x01") == 1
    with pytest.raises(FrameError, match="malformed"):
        events_from_bytes(frame.replace(b"\x20\x01", b"\x20\x63"))
