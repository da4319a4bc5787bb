"""Spans: ids minted early, exported late, over real OTLP/gRPC; nothing at all without an endpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import NOOP_SPAN, TraceContext, Tracing, parse_traceparent


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []

    def Export(self, request, context):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> dict[str, object]:
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    sink = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield sink, f"http://127.0.0.1:{port}"
    server.stop(0)


def test_parents_attributes_events_and_errors_arrive(receiver: tuple[Receiver, str]) -> None:
    sink, endpoint = receiver
    tracing = Tracing.from_config(TelemetryConfig(otlp_endpoint=endpoint), "svc", {"service.instance.id": "i-1"})
    root = tracing.begin_root("root", None, attributes={"n": 3})
    child = tracing.begin("child", root.context, start_ns=1_000)
    assert tracing.open_spans() == 2
    root.event("first", size=1)
    root.set("late", True)
    root.end()
    root.end(error="a second end is ignored")
    child.end(5_000, error="boom")  # the child outlives its parent
    assert tracing.open_spans() == 0
    tracing.shutdown()
    spans = sink.spans()
    got_root, got_child = spans["root"], spans["child"]
    assert root.context is not None
    assert got_root.span_id == root.context.span_id
    assert got_root.trace_id == got_child.trace_id == root.context.trace_id
    assert got_child.parent_span_id == got_root.span_id
    assert (got_child.start_time_unix_nano, got_child.end_time_unix_nano) == (1_000, 5_000)
    assert got_child.status.message == "boom"
    assert got_root.status.code == 0
    assert {item.key for item in got_root.attributes} == {"n", "late"}
    assert [event.name for event in got_root.events] == ["first"]
    resource = sink.requests[0].resource_spans[0].resource
    assert {item.key: item.value.string_value for item in resource.attributes}["service.instance.id"] == "i-1"


def test_without_an_endpoint_nothing_is_recorded_or_started() -> None:
    before = threading.active_count()
    tracing = Tracing.from_config(TelemetryConfig(), "svc")
    assert tracing.begin_root("root", None) is NOOP_SPAN
    caller = TraceContext(b"\1" * 16, b"\2" * 8)
    span = tracing.begin_root("root", caller)
    assert not span.recording
    assert span.context == caller, "the trace of the caller goes on at the next service"
    span.set("a", 1)
    span.end()
    tracing.shutdown()
    assert threading.active_count() == before


def test_sampling_obeys_the_parent_and_otherwise_the_ratio(receiver: tuple[Receiver, str]) -> None:
    tracing = Tracing.from_config(TelemetryConfig(otlp_endpoint=receiver[1], sample_ratio=0.0), "svc")
    own = tracing.begin_root("r", None)
    assert not own.recording
    assert own.context is not None
    assert not tracing.begin("child", own.context).recording
    refused = TraceContext(b"\1" * 16, b"\2" * 8, flags=0)
    assert tracing.begin_root("r", refused).context == refused
    assert not tracing.begin_root("r", refused).recording
    taken = tracing.begin_root("r", TraceContext(b"\1" * 16, b"\2" * 8, flags=1))
    assert taken.context is not None
    taken.end()
    tracing.shutdown()


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8), st.integers(0, 255))
def test_traceparent_round_trip(trace_id: bytes, span_id: bytes, flags: int) -> None:
    context = TraceContext(trace_id, span_id, flags)
    valid = any(trace_id) and any(span_id)
    assert parse_traceparent(context.to_traceparent()) == (context if valid else None)


@given(st.text(max_size=80))
def test_malformed_traceparents_are_ignored(text: str) -> None:
    parsed = parse_traceparent(text)
    assert parsed is None or parsed.to_traceparent()[3:52] == text.strip()[3:52].lower()
