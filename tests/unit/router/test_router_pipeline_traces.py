"""What a request's trace says, and how failures of the coordinator reach the client."""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from isthmus_core.errors import (
    NoCapacity,
    Overloaded,
)
from isthmus_core.tracing import Tracing, parse_traceparent
from isthmus_router.ports import LegKind
from pipeline_case import KEY, LOST, Bench, ask, text_of
from router_fakes import FakeModel


async def test_what_is_missing_is_said() -> None:
    bench = Bench()
    assert bench.pipeline.missing() == []
    bench.coordinator.models = [FakeModel("other", 10)]
    assert "serves m" in bench.pipeline.missing()[0]
    bench.coordinator.ready = False
    assert bench.pipeline.missing() == ["the coordinator can not be reached"]


def traced() -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracing(exporter, "router", {}), exporter


async def test_one_trace_joins_the_client_the_route_and_the_legs() -> None:
    tracing, exporter = traced()
    bench = Bench(tracing)
    incoming = parse_traceparent(f"00-{'ab' * 16}-{'cd' * 8}-01")
    await bench.run(ask(operation="POST /v1/completions", trace=incoming, max_tokens=3))
    tracing.flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root, route = spans["POST /v1/completions"], spans["route"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "cd" * 8
    assert route.parent is not None
    assert route.parent.span_id == root.context.span_id
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.model"] == "m"
    assert root.attributes["gen_ai.usage.input_tokens"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["isthmus.request_id"] == str(KEY.request_id)
    assert route.attributes is not None
    assert route.attributes["isthmus.context_instance"] == "context-0"
    legs = bench.workers.traces
    assert [trace.span_id if trace else None for trace in legs] == [root.context.span_id.to_bytes(8)] * 2
    assert [trace.span_id if trace else None for trace in bench.coordinator.traces] == [
        route.context.span_id.to_bytes(8)
    ]
    assert tracing.open_spans() == 0
    tracing.shutdown()


@pytest.mark.parametrize("how", ["invalid", "refused", "lost", "cancelled"])
async def test_every_failure_ends_its_spans_as_failed(how: str) -> None:
    tracing, exporter = traced()
    bench = Bench(tracing)
    if how == "cancelled":
        async with aclosing(bench.pipeline.generate(ask())) as parts:
            await anext(parts)
    else:
        bench.coordinator.error = NoCapacity("none") if how == "refused" else None
        bench.script(LegKind.CONTEXT, LOST)
        await bench.fail(ask(max_tokens=0 if how == "invalid" else None))
    tracing.flush()
    root = next(span for span in exporter.get_finished_spans() if span.name == "test")
    assert not root.status.is_ok
    assert tracing.open_spans() == 0
    tracing.shutdown()


async def test_overload_of_the_coordinator_reaches_the_client_as_it_is() -> None:
    bench = Bench(error=Overloaded("placements", 5))
    assert (await bench.fail(ask())).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await bench.settle(aborted=False, placed=False)


async def test_a_request_waits_for_a_coordinator_that_is_started_again() -> None:
    bench = Bench()
    lapsed = NoCapacity("the lease on request ids has lapsed")
    mint, bench.coordinator.ready = bench.coordinator.mint_id, False

    def refuse() -> int:
        raise lapsed

    bench.coordinator.mint_id = refuse  # type: ignore[method-assign]
    running = asyncio.create_task(bench.run(ask(request_id=0)))
    await asyncio.sleep(0.02)
    assert not running.done()
    bench.coordinator.mint_id = mint  # type: ignore[method-assign]
    assert text_of(await running) == "Hi!"
    # One that stands and grants nothing says so.
    bench.coordinator.mint_id, bench.coordinator.ready = refuse, True  # type: ignore[method-assign]
    assert await bench.fail(ask(request_id=0)) is lapsed
