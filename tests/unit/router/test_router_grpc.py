"""The gRPC front end against a client that does not read."""

import asyncio
from typing import Any

import grpc
from isthmus.v1 import inference_service_pb2 as pb

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.grpc_server import InferenceServicer
from isthmus_router.pipeline import Pipeline
from router_fakes import FakeCoordinator, FakeWorkers


class StuckContext:
    """A call whose client takes nothing."""

    code: grpc.StatusCode | None = None

    def __init__(self, time_remaining: float | None) -> None:
        self._time_remaining = time_remaining

    def time_remaining(self) -> float | None:
        return self._time_remaining

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def write(self, _: Any) -> None:
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        self.code = code
        raise grpc.aio.AbortError


async def run(
    time_remaining: float | None, configured: float, client_timeout_s: float = 1000
) -> tuple[StuckContext, FakeCoordinator]:
    coordinator = FakeCoordinator()
    tracing = Tracing.from_config(TelemetryConfig(), "test")
    pipeline = Pipeline(coordinator, FakeWorkers(), {"m": ByteTokenizer()}, tracing, max_text_bytes=100)
    context = StuckContext(time_remaining)
    servicer = InferenceServicer(pipeline, request_timeout_s=configured, client_timeout_s=client_timeout_s)
    try:
        await servicer.Generate(pb.InferenceServiceGenerateRequest(prompt="abc"), context)  # type: ignore[arg-type]
    except grpc.aio.AbortError:
        pass
    await pipeline.close()
    return context, coordinator


async def test_the_clients_deadline_ends_it() -> None:
    context, coordinator = await run(time_remaining=0.2, configured=1000)
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (coordinator.open, len(coordinator.finished)) == (set(), 1)


async def test_without_one_the_configured_deadline_does() -> None:
    for absent in (None, float("inf")):
        context, coordinator = await run(time_remaining=absent, configured=0.2)
        assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (coordinator.open, len(coordinator.finished)) == (set(), 1)


async def test_a_client_that_takes_nothing_is_dropped_long_before_its_deadline() -> None:
    context, coordinator = await run(time_remaining=1000, configured=1000, client_timeout_s=0.2)
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (coordinator.open, len(coordinator.finished)) == (set(), 1)
