"""From finished span records to an OTLP receiver, on a thread of its own and within a bounded buffer.

A receiver that is slow or can not be reached costs the service nothing: what does not fit is dropped and counted, and
the log says once that spans are lost, and once that they arrive again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from isthmus_core.trace_context import SAMPLED, TraceContext

logger = logging.getLogger(__name__)

AttributeValue = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, AttributeValue]
# Records that wait for the thread: about 16 MB.
MAX_PENDING = 16_384
_BATCH = 512
_INTERVAL_S = 0.5
_KINDS = {kind.name.lower(): kind for kind in SpanKind}
_SCOPE = InstrumentationScope("isthmus")


@dataclass(slots=True)
class SpanRecord:
    """A span as it is taken down on the way. `events`: (Unix ns, name, attributes). `error`: it failed, and why."""

    name: str
    kind: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    end_ns: int = 0
    attributes: Attributes = field(default_factory=dict[str, AttributeValue])
    events: list[tuple[int, str, Attributes]] = field(default_factory=list[tuple[int, str, Attributes]])
    links: list[TraceContext] = field(default_factory=list[TraceContext])
    error: str | None = None


class SpanSender:
    """Takes records, from any thread, and never waits for the receiver."""

    def __init__(self, exporter: SpanExporter, attributes: Mapping[str, str]) -> None:
        self._exporter = exporter
        self._resource = Resource.create(attributes)
        self._pending: deque[SpanRecord] = deque()
        self._wake = threading.Event()
        self._sent = threading.Condition()
        self._flushes = self._flushed = 0
        self._stopping = self._failing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="isthmus-spans", daemon=True)
        self._thread.start()

    def put(self, record: SpanRecord) -> None:
        """Send it some time."""
        waiting = len(self._pending)
        if waiting >= MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(record)
        if waiting >= _BATCH and not self._wake.is_set():
            self._wake.set()

    def flush(self, timeout_s: float) -> None:
        """Wait until what was put before has been handed to the receiver, or dropped."""
        with self._sent:
            self._flushes += 1
            wanted = self._flushes
            self._wake.set()
            self._sent.wait_for(lambda: self._flushed >= wanted, timeout_s)

    def shutdown(self, timeout_s: float) -> None:
        """Flush and stop; a receiver that can not be reached is not waited for longer than `timeout_s` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        # Also ends an export that hangs in a retry.
        self._exporter.shutdown()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            self._wake.wait(_INTERVAL_S)
            self._wake.clear()
            stopping, flushes = self._stopping, self._flushes
            while self._pending:
                count = min(len(self._pending), _BATCH)
                if not self._export([self._span(self._pending.popleft()) for _ in range(count)]):
                    break
            if self._failing and (stopping or flushes > self._flushed):
                # Nobody waits for a receiver that does not answer.
                self.dropped += len(self._pending)
                self._pending.clear()
            with self._sent:
                self._flushed = flushes
                self._sent.notify_all()
            if stopping:
                return

    def _export(self, spans: Sequence[ReadableSpan]) -> bool:
        ok = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if not ok:
            self.dropped += len(spans)
        if ok == self._failing:
            self._failing = not ok
            if ok:
                logger.info("spans arrive at telemetry.otlp_endpoint again; %d were lost", self.dropped)
            else:
                logger.warning("spans are lost: telemetry.otlp_endpoint does not take them; requests go on without")
        return ok

    def _span(self, record: SpanRecord) -> ReadableSpan:
        failed = record.error is not None
        return ReadableSpan(
            record.name,
            _context(record.context, remote=False),
            parent=None if record.parent is None else _context(record.parent, remote=True),
            resource=self._resource,
            attributes=record.attributes,
            events=[Event(name, attributes, at_ns) for at_ns, name, attributes in record.events],
            links=[Link(_context(one, remote=True)) for one in record.links],
            kind=_KINDS[record.kind],
            status=Status(StatusCode.ERROR, record.error) if failed else Status(StatusCode.UNSET),
            start_time=record.start_ns,
            end_time=record.end_ns,
            instrumentation_scope=_SCOPE,
        )


def _context(context: TraceContext, *, remote: bool) -> SpanContext:
    ids = int.from_bytes(context.trace_id), int.from_bytes(context.span_id)
    return SpanContext(*ids, is_remote=remote, trace_flags=TraceFlags(SAMPLED))
