"""What a worker sends is checked before anything is made of it."""

import pytest
from isthmus.v1 import worker_service_pb2 as pb
from isthmus.v1.common_pb2 import TokenIds
from isthmus.v1.generation_pb2 import ContextPhaseParams, TokenChunk, TokenLogprobs

from isthmus_core.errors import InternalError
from isthmus_core.keys import RequestKey
from isthmus_router import ports
from isthmus_router.ports import FinishReason, Leg, LegKind, Sampling
from isthmus_router.worker_messages import to_event, to_request
from router_fakes import CONTEXT

TWO = TokenIds(le_uint32=b"\1\0\0\0\2\0\0\0")
RATED = TokenLogprobs(logprob=-1, top_tokens=TWO, top_logprobs=[-1, -2])


def leg(kind: LegKind = LegKind.BOTH, *, n: int = 2, logprobs: int | None = None) -> Leg:
    return Leg(RequestKey(1 << 41), kind, b"", Sampling(9, n=n, logprobs=logprobs))


def test_a_chunk_of_an_answer() -> None:
    chunk = TokenChunk(sample=1, tokens=TWO, logprobs=[RATED, RATED], finish_reason="FINISH_REASON_STOP")
    event = to_event(pb.WorkerServiceGenerateResponse(tokens=chunk), leg(logprobs=2), CONTEXT)
    assert isinstance(event, ports.Tokens)
    assert (event.ids, event.sample, event.reason) == ((1, 2), 1, FinishReason.STOP)
    assert [entry.top for entry in event.logprobs] == [((1, -1.0), (2, -2.0))] * 2


@pytest.mark.parametrize(
    ("chunk", "asked", "words"),
    [
        (TokenChunk(sample=2, tokens=TWO), leg(), "answer 2 of 2"),
        (TokenChunk(tokens=TokenIds(le_uint32=b"123")), leg(), "3 bytes"),
        (TokenChunk(tokens=TWO, logprobs=[RATED, RATED]), leg(), "0 expected"),
        (TokenChunk(tokens=TWO, logprobs=[RATED]), leg(logprobs=2), "1 log prob"),
        (TokenChunk(tokens=TWO, logprobs=[RATED, TokenLogprobs(top_tokens=TWO)]), leg(logprobs=2), "zip"),
        (TokenChunk(tokens=TWO, finish_reason=9), leg(), "FinishReason"),  # type: ignore[arg-type]
    ],
)
def test_chunks_that_do_not_belong_to_the_request_name_the_instance(chunk: TokenChunk, asked: Leg, words: str) -> None:
    with pytest.raises(InternalError, match=words) as caught:
        to_event(pb.WorkerServiceGenerateResponse(tokens=chunk), asked, CONTEXT)
    assert "context-0" in caught.value.message
    params = ContextPhaseParams(first_tokens=[chunk])
    ready = pb.WorkerServiceGenerateResponse(context_ready=pb.ContextReady(params=params))
    with pytest.raises(InternalError):
        to_event(ready, Leg(asked.key, LegKind.CONTEXT, b"", asked.sampling), CONTEXT)


def test_only_a_context_leg_is_ready() -> None:
    ready = pb.WorkerServiceGenerateResponse(context_ready=pb.ContextReady())
    with pytest.raises(InternalError, match="GENERATION leg"):
        to_event(ready, leg(LegKind.GENERATION), CONTEXT)
    with pytest.raises(InternalError, match="an unknown event"):
        to_event(pb.WorkerServiceGenerateResponse(), leg(), CONTEXT)


def test_an_adapter_is_named_to_the_worker() -> None:
    asked = Leg(RequestKey(1 << 41), LegKind.BOTH, b"", Sampling(9), adapter="poet")
    assert to_request(asked).adapter == "poet"
