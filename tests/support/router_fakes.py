"""Stand-ins for what a router talks to: a coordinator and workers in memory, scripted per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio
from isthmus.v1 import worker_service_pb2 as worker_pb
from isthmus.v1 import worker_service_pb2_grpc
from isthmus.v1.common_pb2 import TokenIds
from isthmus.v1.generation_pb2 import ContextPhaseParams, HandoffReport, RequestReport, TokenChunk

from isthmus_core import token_ids
from isthmus_core.errors import DuplicateRequest, IsthmusError
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.rpc import abort_with
from isthmus_core.tracing import TraceContext
from isthmus_router.ports import (
    ContextReady,
    Finished,
    FinishReason,
    InstanceRef,
    Leg,
    LegEvent,
    LegKind,
    PlacementRequest,
    Tokens,
    TookOver,
)


@dataclass(frozen=True)
class FakeInstance:
    instance_id: str
    endpoint: str = "127.0.0.1:1"
    incarnation: bytes = b"i" * 16


@dataclass(frozen=True)
class FakePlacement:
    context: FakeInstance | None
    generation: FakeInstance

    def describe(self) -> dict[str, str | int | float]:
        return {"isthmus.placement.policy": "fake"}


@dataclass(frozen=True)
class FakeModel:
    name: str
    max_model_len: int


CONTEXT = FakeInstance("context-0")
GENERATION = FakeInstance("generation-0")
SPLIT = FakePlacement(CONTEXT, GENERATION)
WHOLE = FakePlacement(None, FakeInstance("whole-0"))


@dataclass
class FakeCoordinator:
    """Places everything on `placement`; refuses live duplicates. `open` and `finished` are what a test looks at."""

    placement: FakePlacement = SPLIT
    models: list[FakeModel] = field(default_factory=lambda: [FakeModel("m", 100)])
    ready: bool = True
    error: IsthmusError | None = None
    gate: asyncio.Event | None = None
    selecting: asyncio.Event = field(default_factory=asyncio.Event)
    open: set[RequestKey] = field(default_factory=set[RequestKey])
    finished: list[RequestKey] = field(default_factory=list[RequestKey])
    prefills: list[RequestKey] = field(default_factory=list[RequestKey])
    questions: list[PlacementRequest] = field(default_factory=list[PlacementRequest])
    traces: list[TraceContext | None] = field(default_factory=list[TraceContext | None])
    next_id: int = MIN_GLOBAL_ID

    @property
    def selects(self) -> list[tuple[RequestKey, str, int, int]]:
        """Key, model, tokens of the prompt, most tokens to come, of every question."""
        return [(one.key, one.model, one.prompt_tokens, one.max_tokens) for one in self.questions]

    def served(self) -> Sequence[FakeModel]:
        return self.models

    def mint_id(self) -> int:
        self.next_id += 1
        return self.next_id

    async def select(self, question: PlacementRequest, timeout_s: float) -> FakePlacement:
        key = question.key
        self.questions.append(question)
        self.traces.append(question.trace)
        self.selecting.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if any(live.request_id == key.request_id for live in self.open):
            raise DuplicateRequest(key.request_id)
        self.open.add(key)
        return self.placement

    def prefilled(self, key: RequestKey) -> None:
        assert key in self.open
        self.prefills.append(key)

    def finish(self, key: RequestKey) -> None:
        self.open.remove(key)
        self.finished.append(key)


@dataclass(frozen=True)
class Hang:
    """Script step: wait until cancelled. `reached` is set first."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Pause:
    """Script step: wait for `go`."""

    go: asyncio.Event


Step = LegEvent | TookOver | IsthmusError | Hang | Pause


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def ready(
    first: Sequence[int] | Sequence[Tokens] = (72,), *, prefill_s: int = 1, cached_tokens: int = 0
) -> ContextReady:
    """A context leg's end: token ids of the only answer, or a chunk for each answer."""
    chunks = tuple(item for item in first if isinstance(item, Tokens))
    chunks = chunks or (Tokens(tuple(item for item in first if isinstance(item, int))),)
    rows = [TokenChunk(sample=c.sample, tokens=TokenIds(le_uint32=token_ids.pack(c.ids))) for c in chunks]
    params = ContextPhaseParams(first_tokens=rows, endpoint="ctx", prompt_tokens=3)
    report = RequestReport(cached_tokens=cached_tokens)
    report.prefill.FromSeconds(prefill_s)
    return ContextReady(chunks, params, report)


def finished(*, handoff: bool = False) -> Finished:
    """A request's end."""
    report = RequestReport(decode_tokens=2)
    if handoff:
        report.handoff.CopyFrom(HandoffReport(bytes=4096, path="fake"))
    return Finished(report)


def last(*ids: int, reason: FinishReason = LENGTH, sample: int = 0) -> Tokens:
    """The last chunk of an answer."""
    return Tokens(ids, sample, reason=reason)


@dataclass
class FakeWorkers:
    """Plays one script per kind of leg."""

    scripts: dict[LegKind, list[Step]] = field(
        default_factory=lambda: {
            LegKind.CONTEXT: [ready()],
            LegKind.GENERATION: [Tokens((105,)), last(33), finished(handoff=True)],
            LegKind.BOTH: [Tokens((72,)), last(105, reason=STOP), finished()],
        }
    )
    legs: list[tuple[str, Leg]] = field(default_factory=list[tuple[str, Leg]])
    traces: list[TraceContext | None] = field(default_factory=list[TraceContext | None])
    timeouts: list[float] = field(default_factory=list[float])
    aborted: list[tuple[str, RequestKey]] = field(default_factory=list[tuple[str, RequestKey]])
    running: int = 0
    abort_error: IsthmusError | None = None

    async def generate(
        self, instance: InstanceRef, leg: Leg, *, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[LegEvent | TookOver, None]:
        self.legs.append((instance.instance_id, leg))
        self.traces.append(trace)
        self.timeouts.append(timeout_s)
        self.running += 1
        try:
            for step in self.scripts[leg.kind]:
                if isinstance(step, Hang):
                    step.reached.set()
                    await asyncio.Event().wait()
                elif isinstance(step, Pause):
                    await step.go.wait()
                elif isinstance(step, IsthmusError):
                    raise step
                else:
                    yield step
        finally:
            self.running -= 1

    async def abort(self, instance: InstanceRef, key: RequestKey) -> None:
        self.aborted.append((instance.instance_id, key))
        if self.abort_error is not None:
            raise self.abort_error


_GenerateContext = grpc.aio.ServicerContext[
    worker_pb.WorkerServiceGenerateRequest, worker_pb.WorkerServiceGenerateResponse
]


class FakeWorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """A worker over gRPC: each answer echoes the prompt, reversed, one token a message; splits as the legs say.

    A token that is among the request's stop tokens ends an answer. `logprobs`: -1 for the chosen token, -2 for the ones
    after it in the vocabulary.
    `hang_after`: stop sending after so many tokens and wait for the end of the call. `cancelled` counts the calls that
    ended early, `aborts` the keys that were withdrawn, `metadata` what came with the calls.
    """

    def __init__(self, hang_after: int | None = None) -> None:
        self.hang_after = hang_after
        self.requests: list[worker_pb.WorkerServiceGenerateRequest] = []
        self.aborts: list[int] = []
        self.metadata: list[dict[str, str]] = []
        self.time_left: list[float] = []
        self.cancelled = 0
        self.completed = 0
        self.hanging = asyncio.Event()
        self.error: IsthmusError | None = None

    async def Generate(
        self, request: worker_pb.WorkerServiceGenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[worker_pb.WorkerServiceGenerateResponse]:
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata() or ()})
        self.time_left.append(context.time_remaining())
        try:
            if self.error is not None:
                await abort_with(context, self.error)
            chunks = _chunks(request)
            context_only = request.request_type == worker_pb.REQUEST_TYPE_CONTEXT_ONLY
            first = chunks[: max(1, request.sampling.n)]
            if context_only and not all(chunk.finish_reason for chunk in first):
                yield self._ready(request, first)
            else:
                skip = len(request.context_phase.first_tokens)
                for count, chunk in enumerate(chunks[skip:]):
                    if count == self.hang_after:
                        self.hanging.set()
                        await asyncio.Event().wait()
                    yield worker_pb.WorkerServiceGenerateResponse(tokens=chunk)
                end = worker_pb.Finished(report=RequestReport(decode_tokens=len(chunks), cached_tokens=2))
                yield worker_pb.WorkerServiceGenerateResponse(finished=end)
            self.completed += 1
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def Abort(
        self,
        request: worker_pb.AbortRequest,
        context: grpc.aio.ServicerContext[worker_pb.AbortRequest, worker_pb.AbortResponse],
    ) -> worker_pb.AbortResponse:
        self.aborts.append(request.key.request_id)
        return worker_pb.AbortResponse()

    def _ready(
        self, request: worker_pb.WorkerServiceGenerateRequest, first: Sequence[TokenChunk]
    ) -> worker_pb.WorkerServiceGenerateResponse:
        params = ContextPhaseParams(
            key=request.key,
            first_tokens=first,
            prompt_tokens=len(request.prompt.le_uint32) // 4,
            instance_id="context",
        )
        report = RequestReport(cached_tokens=2)
        return worker_pb.WorkerServiceGenerateResponse(
            context_ready=worker_pb.ContextReady(params=params, report=report)
        )


def _chunks(request: worker_pb.WorkerServiceGenerateRequest) -> list[TokenChunk]:
    """Everything that a request's answers consist of, one token at a time, the answers taking turns."""
    sampling = request.sampling
    tokens = token_ids.unpack(request.prompt.le_uint32)[::-1][: sampling.max_tokens]
    stop = next((i for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
    tokens = tokens if stop is None else tokens[: stop + 1]
    chunks: list[TokenChunk] = []
    for position, token in enumerate(tokens):
        for sample in range(max(1, sampling.n)):
            chunk = TokenChunk(sample=sample, tokens=TokenIds(le_uint32=token_ids.pack([token])))
            if sampling.HasField("logprobs"):
                top = [token + offset for offset in range(sampling.logprobs)]
                chunk.logprobs.add(
                    logprob=-1.0,
                    top_tokens=TokenIds(le_uint32=token_ids.pack(top)),
                    top_logprobs=[-1.0 - offset for offset in range(len(top))],
                )
            if position + 1 == len(tokens):
                chunk.finish_reason = "FINISH_REASON_LENGTH" if stop is None else "FINISH_REASON_STOP"  # type: ignore[assignment]
            chunks.append(chunk)
    return chunks
