"""An OTLP/gRPC receiver of traces and metrics in the test's own process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it arrived; ids as hex, no parent = empty string. `events` by name; `links`: ids of spans; arrays are
    joined by commas."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    error: str
    resource: dict[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    events: tuple[tuple[str, dict[str, str | int | float | bool]], ...] = ()
    links: tuple[str, ...] = ()


def _value(value: AnyValue) -> str | int | float | bool:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return ",".join(str(_value(one)) for one in value.array_value.values)
    return "" if kind is None else getattr(value, kind)


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, found: dict[str, Metric]) -> None:
        self._found = found

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: object
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        """Take metrics in."""
        for group in request.resource_metrics:
            for scope in group.scope_metrics:
                self._found.update({metric.name: metric for metric in scope.metrics})
        return metrics_service_pb2.ExportMetricsServiceResponse()


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans, and the last state of each metric by name. Use as an async context manager; `endpoint` is what
    telemetry.otlp_endpoint wants."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host, self.port = host, 0
        self.spans: list[ReceivedSpan] = []
        self.metrics: dict[str, Metric] = {}
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._arrived = asyncio.Event()
        self.endpoint = ""

    async def __aenter__(self) -> OtlpReceiver:
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # pyright: ignore[reportUnknownMemberType]
            self, self._server
        )
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # pyright: ignore[reportUnknownMemberType]
            _Metrics(self.metrics), self._server
        )
        self.port = self._server.add_insecure_port(f"{self.host}:0")
        self.endpoint = f"http://127.0.0.1:{self.port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Take spans in."""
        for group in request.resource_spans:
            resource = {item.key: _value(item.value) for item in group.resource.attributes}
            for scope in group.scope_spans:
                for span in scope.spans:
                    attributes = {item.key: _value(item.value) for item in span.attributes}
                    received = ReceivedSpan(
                        str(resource.get("service.name", "")),
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        attributes,
                        span.status.message if span.status.code == 2 else "",
                        resource,
                        tuple(
                            (one.name, {item.key: _value(item.value) for item in one.attributes}) for one in span.events
                        ),
                        tuple(link.span_id.hex() for link in span.links),
                    )
                    self.spans.append(received)
        self._arrived.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    def open_ends(self) -> list[ReceivedSpan]:
        """Spans whose parent has not arrived: it is still open, or nobody ended it."""
        known = {span.span_id for span in self.spans}
        return [span for span in self.spans if span.parent_id and span.parent_id not in known]

    async def settle(self, wanted: int, timeout_s: float = 20.0) -> list[ReceivedSpan]:
        """Wait until at least `wanted` spans are here and none misses its parent. AssertionError after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while len(self.spans) < wanted or self.open_ends():
            self._arrived.clear()
            left = deadline - loop.time()
            if left <= 0:
                raise AssertionError(f"{len(self.spans)} of {wanted} spans; without parent: {self.open_ends()}")
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                continue
        return list(self.spans)
