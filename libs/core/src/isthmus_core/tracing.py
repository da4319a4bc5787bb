"""Tracing that costs the hot path a clock reading: ids are minted at `begin`, everything else happens later.

`Span.end` hands a finished record to a thread that sends it (`span_export`). Children, also those of other processes,
can name their parent before it ends. Without an OTLP endpoint every span is the shared no-op and nothing is started.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExporter

from isthmus_core.config_telemetry import TelemetryConfig
from isthmus_core.span_export import AttributeValue as AttributeValue
from isthmus_core.span_export import SpanRecord, SpanSender
from isthmus_core.trace_context import SAMPLED as SAMPLED
from isthmus_core.trace_context import TraceContext as TraceContext
from isthmus_core.trace_context import parse_traceparent as parse_traceparent

_EXPORT_TIMEOUT_S = 5


class Span:
    """An open span. One that is not recorded ignores everything; it still passes on the trace it belongs to."""

    __slots__ = ("_record", "_tracing", "context")

    def __init__(self, tracing: Tracing | None, record: SpanRecord | None, context: TraceContext | None = None) -> None:
        self._tracing = tracing
        self._record = record
        # Parent for children, here or in another process.
        self.context = context if record is None else record.context

    @property
    def recording(self) -> bool:
        """True when somebody will see it."""
        return self._record is not None

    def set(self, key: str, value: AttributeValue) -> None:
        """Set an attribute."""
        if self._record is not None:
            self._record.attributes[key] = value

    def update(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Set several attributes."""
        if self._record is not None:
            self._record.attributes.update(attributes)

    def event(self, name: str, **attributes: AttributeValue) -> None:
        """Record that something happened now."""
        if self._record is not None:
            self._record.events.append((time.time_ns(), name, attributes))

    def event_at(self, at_ns: int, name: str, **attributes: AttributeValue) -> None:
        """Record that something happened at `at_ns` (Unix time)."""
        if self._record is not None:
            self._record.events.append((at_ns, name, attributes))

    def end(self, end_ns: int | None = None, *, error: str | None = None) -> None:
        """End the span, once; later calls do nothing. `error` marks it failed with that description."""
        if self._record is None or self._tracing is None or self._record.end_ns:
            return
        self._record.end_ns = end_ns or time.time_ns()
        self._record.error = error
        self._tracing.finish(self._record)


NOOP_SPAN = Span(None, None)


class Tracing:
    """Tracing of one process. Thread-safe."""

    def __init__(
        self, exporter: SpanExporter | None, service: str, attributes: dict[str, str], ratio: float = 1.0
    ) -> None:
        self._ratio = ratio
        self._open = 0
        self._lock = threading.Lock()
        self._sender = None if exporter is None else SpanSender(exporter, {"service.name": service, **attributes})

    @classmethod
    def from_config(cls, config: TelemetryConfig, service: str, attributes: dict[str, str] | None = None) -> Tracing:
        """Tracing as configured; without an OTLP endpoint it records nothing."""
        exporter = None
        if config.otlp_endpoint is not None:
            insecure = not config.otlp_endpoint.startswith("https://")
            exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=insecure, timeout=_EXPORT_TIMEOUT_S)
        return cls(exporter, service, attributes or {}, config.sample_ratio)

    @property
    def enabled(self) -> bool:
        """True when spans go anywhere."""
        return self._sender is not None

    def records(self, parent: TraceContext | None) -> bool:
        """True when a child of `parent` would be recorded: only then is it worth knowing what it is about."""
        return self._sender is not None and parent is not None and parent.sampled

    def open_spans(self) -> int:
        """Spans begun and not ended: 0 on an idle process."""
        return self._open

    def dropped_spans(self) -> int:
        """Spans that the receiver did not get."""
        return 0 if self._sender is None else self._sender.dropped

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: str = "internal",
        start_ns: int | None = None,
        attributes: dict[str, AttributeValue] | None = None,
        links: Sequence[TraceContext] = (),
    ) -> Span:
        """Open a child of `parent`; it records nothing when that is None or not sampled. `start_ns`: Unix time, default
        now. `links`: other spans that this one has to do with."""
        if parent is None:
            return NOOP_SPAN
        if self._sender is None or not parent.sampled:
            return Span(None, None, parent)
        return self._begin(name, parent.trace_id, parent, kind, start_ns, attributes, links)

    def begin_root(
        self,
        name: str,
        incoming: TraceContext | None,
        *,
        kind: str = "server",
        start_ns: int | None = None,
        attributes: dict[str, AttributeValue] | None = None,
    ) -> Span:
        """Open the span of a request at the front door: a parent's decision is obeyed, else `sample_ratio` decides."""
        if incoming is not None:
            return self.begin(name, incoming, kind=kind, start_ns=start_ns, attributes=attributes)
        if self._sender is None:
            return NOOP_SPAN
        trace_id = os.urandom(16)
        # As the SDK's ratio sampler: the low 64 bits of the id against the bound, so all services would agree.
        if int.from_bytes(trace_id[8:]) >= self._ratio * (1 << 64):
            # The ids still join the log lines of a request.
            return Span(None, None, TraceContext(trace_id, os.urandom(8), flags=0))
        return self._begin(name, trace_id, None, kind, start_ns, attributes)

    def _begin(
        self,
        name: str,
        trace_id: bytes,
        parent: TraceContext | None,
        kind: str,
        start_ns: int | None,
        attributes: dict[str, AttributeValue] | None,
        links: Sequence[TraceContext] = (),
    ) -> Span:
        context = TraceContext(trace_id, os.urandom(8), SAMPLED)
        with self._lock:
            self._open += 1
        started = start_ns or time.time_ns()
        record = SpanRecord(name, kind, context, parent, started, attributes=dict(attributes or {}), links=list(links))
        return Span(self, record)

    def finish(self, record: SpanRecord) -> None:
        """Take over an ended record (called by `Span.end`)."""
        with self._lock:
            self._open -= 1
        if self._sender is not None:
            self._sender.put(record)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until every ended span has been handed to the receiver."""
        if self._sender is not None:
            self._sender.flush(timeout_s)

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Flush and stop; spans that end later are lost."""
        if self._sender is not None:
            self._sender.shutdown(timeout_s)
