"""Stand-ins for what a router talks to: a coordinator and workers in memory, scripted per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc.aio
from isthmus.v1 import worker_service_pb2 as worker_pb
from isthmus.v1 import worker_service_pb2_grpc
from isthmus.v1.common_pb2 import TokenIds
from isthmus.v1.generation_pb2 import ContextPhaseParams, HandoffReport, RequestReport

from isthmus_core import token_ids
from isthmus_core.errors import DuplicateRequest, IsthmusError
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.rpc import abort_with
from isthmus_core.tracing import TraceContext
from isthmus_router.ports import ContextReady, Finished, FinishReason, InstanceRef, Leg, LegEvent, LegKind, Tokens


@dataclass(frozen=True)
class FakeInstance:
    instance_id: str
    endpoint: str = "127.0.0.1:1"
    incarnation: bytes = b"i" * 16


@dataclass(frozen=True)
class FakePlacement:
    context: FakeInstance | None
    generation: FakeInstance


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
    selects: list[tuple[RequestKey, str, int, int]] = field(default_factory=list[tuple[RequestKey, str, int, int]])
    traces: list[TraceContext | None] = field(default_factory=list[TraceContext | None])
    next_id: int = MIN_GLOBAL_ID

    def served(self) -> Sequence[FakeModel]:
        return self.models

    def mint_id(self) -> int:
        self.next_id += 1
        return self.next_id

    async def select(
        self,
        key: RequestKey,
        model: str,
        prompt_tokens: int,
        max_tokens: int,
        trace: TraceContext | None,
        timeout_s: float,
    ) -> FakePlacement:
        self.selects.append((key, model, prompt_tokens, max_tokens))
        self.traces.append(trace)
        self.selecting.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if any(live.request_id == key.request_id for live in self.open):
            raise DuplicateRequest(key.request_id)
        self.open.add(key)
        return self.placement

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


Step = LegEvent | IsthmusError | Hang | Pause


def ready(first: Sequence[int] = (72,), *, prefill_s: int = 1) -> ContextReady:
    """A context leg's end."""
    params = ContextPhaseParams(first_tokens=TokenIds(le_uint32=token_ids.pack(first)), endpoint="ctx", prompt_tokens=3)
    report = RequestReport()
    report.prefill.FromSeconds(prefill_s)
    return ContextReady(tuple(first), params, report)


def finished(reason: FinishReason = FinishReason.LENGTH, *, handoff: bool = False) -> Finished:
    """A request's end."""
    report = RequestReport(decode_tokens=2)
    if handoff:
        report.handoff.CopyFrom(HandoffReport(bytes=4096, path="fake"))
    return Finished(reason, report)


@dataclass
class FakeWorkers:
    """Plays one script per kind of leg."""

    scripts: dict[LegKind, list[Step]] = field(
        default_factory=lambda: {
            LegKind.CONTEXT: [ready()],
            LegKind.GENERATION: [Tokens((105,)), Tokens((33,)), finished(handoff=True)],
            LegKind.BOTH: [Tokens((72,)), Tokens((105,)), finished(FinishReason.STOP)],
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
    ) -> AsyncGenerator[LegEvent, None]:
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
    """A worker over gRPC: echoes the prompt, reversed, one token a message; splits as the legs say.

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
            answer = token_ids.unpack(request.prompt.le_uint32)[::-1][: request.sampling.max_tokens]
            if request.request_type == worker_pb.REQUEST_TYPE_CONTEXT_ONLY and len(answer) > 1:
                yield self._ready(request, answer[:1])
            else:
                skip = len(request.context_phase.first_tokens.le_uint32) // 4
                for count, token in enumerate(answer[skip:]):
                    if count == self.hang_after:
                        self.hanging.set()
                        await asyncio.Event().wait()
                    yield worker_pb.WorkerServiceGenerateResponse(tokens=TokenIds(le_uint32=token_ids.pack([token])))
                end = worker_pb.Finished(reason="FINISH_REASON_LENGTH", report=RequestReport(decode_tokens=len(answer)))
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
        self, request: worker_pb.WorkerServiceGenerateRequest, first: Sequence[int]
    ) -> worker_pb.WorkerServiceGenerateResponse:
        params = ContextPhaseParams(
            key=request.key,
            first_tokens=TokenIds(le_uint32=token_ids.pack(first)),
            prompt_tokens=len(request.prompt.le_uint32) // 4,
            instance_id="context",
        )
        return worker_pb.WorkerServiceGenerateResponse(context_ready=worker_pb.ContextReady(params=params))
