"""WorkerService over real gRPC, an engine process without an engine behind it."""

from __future__ import annotations

import asyncio
import os
import sys
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from isthmus.v1 import worker_service_pb2, worker_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import fake_engine
from fake_engine import ANSWER, DIE, HOLD, REFUSE, STALL
from isthmus_core.config import parse_config
from isthmus_core.errors import from_rpc_error
from isthmus_core.metrics import NO_METRICS
from isthmus_core.rpc import RpcServer, open_channel, outgoing_metadata
from isthmus_core.tracing import TraceContext, Tracing
from isthmus_worker.hub.leg_telemetry import LegTelemetry
from isthmus_worker.hub.servicer import Serving, WorkerServicer
from isthmus_worker.hub.timelines import Timelines
from isthmus_worker.process_engine import EngineLaunch, ProcessEngine
from kvtransfer.ports import Holder
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration
BASE = 1 << 40
HERE = Holder("127.0.0.1:9", "w-0", b"\3" * 16)
CONTEXT, GENERATION, BOTH = 1, 2, 3
CONFIG = parse_config({"worker": {"instance_id": "w-0"}, "engine": {"kind": "mock"}, "model": {"name": "m"}})


@dataclass(frozen=True, slots=True)
class Service:
    engine: ProcessEngine
    stub: worker_service_pb2_grpc.WorkerServiceStub
    tracing: Tracing
    spans: InMemorySpanExporter
    servicer: WorkerServicer

    async def idle(self) -> None:
        await until(lambda: self.engine.open_requests == 0 and self.engine.load().used_blocks == 0)
        await until(lambda: self.tracing.open_spans() == 0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture(name="role")
def _role() -> InstanceRole:
    return InstanceRole.CONTEXT_AND_GENERATION


@pytest.fixture(name="service")
async def _service(role: InstanceRole) -> AsyncGenerator[Service, None]:
    command = (sys.executable, str(Path(fake_engine.__file__)))
    engine = ProcessEngine(EngineLaunch(CONFIG, dict(os.environ), False, 30.0, command=command), "w-0")
    spans = InMemorySpanExporter()
    tracing = Tracing(spans, "isthmus-worker", {})
    servicer = WorkerServicer(role)
    server = RpcServer()
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1:0")
    await engine.start()
    legs = LegTelemetry(tracing, NO_METRICS, Timelines(100), HERE.instance_id)
    servicer.serve(Serving(engine, HERE, engine.load, legs))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        yield Service(engine, stub, tracing, spans, servicer)
    await server.stop(0)
    await engine.stop()
    tracing.shutdown()


def ask(what: int, kind: int = BOTH, number: int = 0, max_tokens: int = 3) -> Any:
    request = worker_service_pb2.WorkerServiceGenerateRequest(request_type=kind)  # type: ignore[arg-type]
    request.key.request_id = BASE + number
    request.prompt.le_uint32 = array("I", [what, 5]).tobytes()
    request.sampling.max_tokens = max_tokens
    return request


async def test_tokens_then_the_end_with_its_report(service: Service):
    answers = [answer async for answer in service.stub.Generate(ask(ANSWER))]
    ids = [token for answer in answers[:-1] for token in array("I", answer.tokens.tokens.le_uint32)]
    assert ids == [0, 1, 2]
    finished = answers[-1].finished
    assert answers[-2].tokens.finish_reason == 2
    assert finished.report.decode_tokens == 2
    assert finished.report.prefill.ToMilliseconds() == 2
    assert not finished.report.HasField("handoff")
    assert (finished.report.context_instance, finished.report.generation_instance) == ("w-0", "w-0")
    await service.idle()


@pytest.mark.parametrize("role", [InstanceRole.CONTEXT])
async def test_a_context_leg_answers_what_the_generation_needs(service: Service):
    answers = [answer async for answer in service.stub.Generate(ask(HOLD, CONTEXT))]
    params = answers[-1].context_ready.params
    assert (params.endpoint, params.instance_id, params.incarnation) == (HERE.endpoint, "w-0", HERE.incarnation)
    assert params.key.request_id == BASE
    assert params.prompt_tokens == 2
    assert array("I", params.first_tokens[0].tokens.le_uint32).tolist() == [42]
    status = await service.stub.GetStatus(worker_service_pb2.GetStatusRequest())
    while not status.load.used_blocks:  # a load is told after the event that changed it
        status = await service.stub.GetStatus(worker_service_pb2.GetStatusRequest())
    assert status.load.used_blocks == 1
    assert status.role == CONTEXT
    # The call is over, the pages are held: only Abort, the hand-off or its deadline end that.
    await service.stub.Abort(worker_service_pb2.AbortRequest(key=params.key))
    await service.idle()
    await service.stub.Abort(worker_service_pb2.AbortRequest(key=params.key))


async def test_a_caller_that_goes_away_cancels_its_request(service: Service):
    calls = [service.stub.Generate(ask(STALL, number=number)) for number in range(20)]
    for call in calls:
        await call.read()
    assert service.engine.open_requests == 20
    for call in calls:
        call.cancel()
    await service.idle()


async def test_a_deadline_cancels_the_request(service: Service):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [answer async for answer in service.stub.Generate(ask(STALL), timeout=0.3)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await service.idle()


async def test_a_refused_duplicate_does_not_touch_the_live_request(service: Service):
    live = service.stub.Generate(ask(STALL))
    await live.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(ask(ANSWER)).read()
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    await asyncio.sleep(0.1)
    assert service.engine.open_requests == 1
    assert not live.done()
    live.cancel()
    await service.idle()


async def test_errors_of_the_engine_keep_their_type(service: Service):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(ask(REFUSE)).read()
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.detail is not None
    assert error.detail.limit == 3
    await service.idle()


async def test_a_lost_engine_is_a_typed_error_and_later_calls_are_refused(service: Service):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [answer async for answer in service.stub.Generate(ask(DIE))]
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.detail is not None
    assert (error.detail.phase, error.detail.instance_id, error.detail.key.request_id) == ("decode", "w-0", BASE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(ask(ANSWER)).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_calls_before_the_engine_is_ready_are_refused_as_unavailable():
    server = RpcServer()
    servicer = WorkerServicer(InstanceRole.CONTEXT)
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        calls: list[Any] = [
            stub.Generate(ask(ANSWER)).read(),
            stub.GetStatus(worker_service_pb2.GetStatusRequest()),
            stub.Abort(worker_service_pb2.AbortRequest(key=ask(1).key)),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "starting" in (caught.value.details() or "")
    await server.stop(0)


def _changed(change: Callable[[Any], object], kind: int = BOTH) -> Any:
    request = ask(ANSWER, kind)
    change(request)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (_changed(lambda r: setattr(r.key, "request_id", 7)), "key.request_id"),
        (_changed(lambda r: r.ClearField("key")), "key.request_id"),
        (_changed(lambda r: setattr(r, "request_type", 0)), "request_type"),
        (_changed(lambda r: setattr(r, "request_type", 99)), "request_type"),
        (ask(ANSWER, CONTEXT), "request_type"),
        (_changed(lambda r: r.ClearField("prompt")), "prompt"),
        (_changed(lambda r: setattr(r.prompt, "le_uint32", b"12345")), "prompt"),
        (_changed(lambda r: setattr(r.sampling, "max_tokens", 0)), "sampling.max_tokens"),
        (_changed(lambda r: r.sampling.stop_token_ids.extend(range(500))), "sampling.stop_token_ids"),
        (_changed(lambda r: setattr(r.context_phase, "endpoint", "x")), "context_phase"),
        (ask(ANSWER, GENERATION), "context_phase"),
    ],
)
async def test_a_wrong_request_is_refused_naming_its_field(service: Service, request_: Any, field: str):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(request_).read()
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.detail is not None
    assert error.detail.field == field
    assert error.detail.remedy
    assert service.engine.open_requests == 0


def _generation(change: Callable[[Any], object]) -> Any:
    request = ask(ANSWER, GENERATION)
    params = request.context_phase
    params.key.CopyFrom(request.key)
    params.first_tokens.add().tokens.le_uint32 = array("I", [42]).tobytes()
    params.prompt_tokens = 2
    params.endpoint, params.instance_id, params.incarnation = "h:1", "c-0", b"\1" * 16
    change(params)
    return request


@pytest.mark.parametrize("role", [InstanceRole.GENERATION])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda p: setattr(p.key, "attempt", 1), "context_phase.key"),
        (lambda p: p.ClearField("first_tokens"), "context_phase.first_tokens"),
        (lambda p: setattr(p, "prompt_tokens", 3), "context_phase.prompt_tokens"),
        (lambda p: setattr(p, "endpoint", ""), "context_phase.endpoint"),
        (lambda p: setattr(p, "instance_id", "x" * 300), "context_phase.instance_id"),
        (lambda p: setattr(p, "incarnation", b"short"), "context_phase.incarnation"),
    ],
)
async def test_a_wrong_context_phase_is_refused_naming_its_field(service: Service, change: Any, field: str):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Generate(_generation(change)).read()
    error = from_rpc_error(caught.value)
    assert error.detail is not None
    assert error.detail.field == field
    answers = [answer async for answer in service.stub.Generate(_generation(lambda _: None))]
    assert answers[-1].finished.report.generation_instance == "w-0"
    assert not answers[-1].finished.report.context_instance


async def test_spans_of_a_leg_hang_under_the_callers(service: Service):
    parent = TraceContext(b"\7" * 16, b"\5" * 8)
    metadata = outgoing_metadata(parent)
    [answer async for answer in service.stub.Generate(ask(ANSWER), metadata=metadata)]
    stalled = service.stub.Generate(ask(STALL, number=1), metadata=metadata)
    await stalled.read()
    stalled.cancel()
    with pytest.raises(grpc.aio.AioRpcError):
        await service.stub.Generate(ask(REFUSE, number=2), metadata=metadata).read()
    [answer async for answer in service.stub.Generate(ask(ANSWER, number=3))]
    await service.idle()
    await asyncio.to_thread(service.tracing.flush)
    spans: list[Any] = list(service.spans.get_finished_spans())
    legs = {int(span.attributes["isthmus.request_id"]) - BASE: span for span in spans if span.name == "worker.request"}
    assert sorted(legs) == [0, 1, 2], "a call without a trace is not recorded"
    assert all(span.parent.span_id == int.from_bytes(parent.span_id) for span in legs.values())
    assert legs[0].status.description is None
    assert "went away" in legs[1].status.description
    assert "full" in legs[2].status.description
    phases = {span.name: span for span in spans if span.parent.span_id == legs[0].context.span_id}
    assert set(phases) == {"queue", "prefill", "decode"}
    for phase in phases.values():
        assert legs[0].start_time <= phase.start_time <= phase.end_time <= legs[0].end_time
    assert phases["prefill"].end_time - phases["prefill"].start_time <= 2_000_000
    assert phases["decode"].attributes["isthmus.tokens"] == 2
