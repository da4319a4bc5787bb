"""Tracing that costs the hot path a clock reading: ids are minted at `begin`, the SDK's span is made later.

`Span.end` hands a finished record to a background thread, which builds the OpenTelemetry span with the ids that were
minted before and gives it to a BatchSpanProcessor. Children (also those of other processes) can therefore name their
parent before it ends. Without an OTLP endpoint every span is the shared no-op and nothing is started.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from isthmus_core.config import TelemetryConfig

logger = logging.getLogger(__name__)

SAMPLED = 1
AttributeValue = str | bool | int | float
_KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}
# Records waiting for the background thread; more are dropped and counted rather than held.
_MAX_PENDING = 65_536


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context: 16-byte trace id, 8-byte span id, flags (bit 0: sampled)."""

    trace_id: bytes
    span_id: bytes
    flags: int = SAMPLED

    def to_traceparent(self) -> str:
        """As the `traceparent` header."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.flags & 0xFF:02x}"

    @property
    def sampled(self) -> bool:
        """True when the trace is recorded."""
        return bool(self.flags & SAMPLED)


def parse_traceparent(header: str) -> TraceContext | None:
    """The context in a `traceparent` header; None when it is malformed (W3C: ignore it then)."""
    parts = header.strip().split("-")
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    try:
        trace_id, span_id, flags = bytes.fromhex(parts[1]), bytes.fromhex(parts[2]), int(parts[3], 16)
    except ValueError:
        return None
    if not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, flags)


@dataclass(slots=True)
class _Record:
    name: str
    kind: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int = 0
    attributes: dict[str, AttributeValue] = field(default_factory=dict[str, AttributeValue])
    events: list[tuple[int, str, dict[str, AttributeValue]]] = field(
        default_factory=list[tuple[int, str, dict[str, AttributeValue]]]
    )
    error: str | None = None


class Span:
    """An open span. A span that is not recorded has `context` None and ignores everything."""

    __slots__ = ("_record", "_tracing")

    def __init__(self, tracing: Tracing | None, record: _Record | None) -> None:
        self._tracing = tracing
        self._record = record

    @property
    def context(self) -> TraceContext | None:
        """Parent for children, here or in another process."""
        return None if self._record is None else self._record.context

    def set(self, key: str, value: AttributeValue) -> None:
        """Set an attribute."""
        if self._record is not None:
            self._record.attributes[key] = value

    def event(self, name: str, **attributes: AttributeValue) -> None:
        """Record that something happened now."""
        if self._record is not None:
            self._record.events.append((time.time_ns(), name, attributes))

    def end(self, end_ns: int | None = None, *, error: str | None = None) -> None:
        """End the span, once; later calls do nothing. `error` marks it failed with that description."""
        if self._record is None or self._tracing is None or self._record.end_ns:
            return
        self._record.end_ns = end_ns or time.time_ns()
        self._record.error = error
        self._tracing.finish(self._record)


NOOP_SPAN = Span(None, None)


class _PresetIds(IdGenerator):
    """Gives the SDK the ids that were minted at `begin`. Only the emitting thread uses it."""

    trace_id = 0
    span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


class Tracing:
    """Tracing of one process. Thread-safe."""

    def __init__(
        self, exporter: SpanExporter | None, service: str, attributes: dict[str, str], ratio: float = 1.0
    ) -> None:
        self._ratio = ratio
        self._open = 0
        self._dropped = 0
        self._lock = threading.Lock()
        self._pending: queue.Queue[_Record | threading.Event | None] = queue.Queue(_MAX_PENDING)
        self._thread: threading.Thread | None = None
        if exporter is None:
            return
        self._ids = _PresetIds()
        resource = Resource.create({"service.name": service, **attributes})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("isthmus")
        self._thread = threading.Thread(target=self._emit_loop, name="isthmus-spans", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: TelemetryConfig, service: str, attributes: dict[str, str] | None = None) -> Tracing:
        """Tracing as configured; without an OTLP endpoint it records nothing."""
        exporter = None
        if config.otlp_endpoint is not None:
            insecure = not config.otlp_endpoint.startswith("https://")
            exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=insecure, timeout=5)
        return cls(exporter, service, attributes or {}, config.sample_ratio)

    @property
    def enabled(self) -> bool:
        """True when spans go anywhere."""
        return self._thread is not None

    def open_spans(self) -> int:
        """Spans begun and not ended: 0 on an idle process."""
        return self._open

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        *,
        kind: str = "internal",
        start_ns: int | None = None,
        attributes: dict[str, AttributeValue] | None = None,
    ) -> Span:
        """Open a child of `parent`; no-op when it is None or not sampled. `start_ns`: Unix time, default now."""
        if self._thread is None or parent is None or not parent.sampled:
            return NOOP_SPAN
        return self._begin(name, parent.trace_id, parent, kind, start_ns, attributes)

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
        if self._thread is None:
            return NOOP_SPAN
        if incoming is not None:
            return self.begin(name, incoming, kind=kind, start_ns=start_ns, attributes=attributes)
        trace_id = os.urandom(16)
        # As the SDK's ratio sampler: the low 64 bits of the id against the bound, so all services would agree.
        if int.from_bytes(trace_id[8:]) >= self._ratio * (1 << 64):
            return NOOP_SPAN
        return self._begin(name, trace_id, None, kind, start_ns, attributes)

    def _begin(
        self,
        name: str,
        trace_id: bytes,
        parent: TraceContext | None,
        kind: str,
        start_ns: int | None,
        attributes: dict[str, AttributeValue] | None,
    ) -> Span:
        context = TraceContext(trace_id, os.urandom(8), SAMPLED)
        with self._lock:
            self._open += 1
        record = _Record(name, kind, context, parent, start_ns or time.time_ns(), attributes=dict(attributes or {}))
        return Span(self, record)

    def finish(self, record: _Record) -> None:
        """Take over an ended record (called by `Span.end`)."""
        with self._lock:
            self._open -= 1
        try:
            self._pending.put_nowait(record)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                logger.warning("spans are dropped: more than %d are waiting for the exporter", _MAX_PENDING)

    def flush(self, timeout_s: float = 5.0) -> None:
        """Wait until every ended span has been handed to the exporter."""
        if self._thread is None:
            return
        reached = threading.Event()
        self._pending.put(reached, timeout=timeout_s)
        reached.wait(timeout_s)
        self._provider.force_flush(int(timeout_s * 1000))

    def shutdown(self) -> None:
        """Flush and stop; spans that end later are lost."""
        if self._thread is None:
            return
        self.flush()
        self._pending.put(None)
        self._thread.join(5)
        self._provider.shutdown()

    def _emit_loop(self) -> None:
        while (item := self._pending.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._emit(item)

    def _emit(self, record: _Record) -> None:
        self._ids.trace_id = int.from_bytes(record.context.trace_id)
        self._ids.span_id = int.from_bytes(record.context.span_id)
        parent_context = None
        if record.parent is not None:
            remote = SpanContext(
                int.from_bytes(record.parent.trace_id), int.from_bytes(record.parent.span_id), True, TraceFlags(SAMPLED)
            )
            parent_context = set_span_in_context(NonRecordingSpan(remote))
        span = self._tracer.start_span(
            record.name,
            context=parent_context,
            kind=_KINDS[record.kind],
            attributes=record.attributes,
            start_time=record.start_ns,
        )
        for at_ns, name, attributes in record.events:
            span.add_event(name, attributes, at_ns)
        if record.error is not None:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(record.end_ns)
