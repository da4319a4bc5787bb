"""Spans, metrics and the timeline of legs, made from the engine's report when a leg is over.

Nothing but a clock is read while tokens flow.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from isthmus_core.metrics import Metrics
from isthmus_core.metrics import workers as metric
from isthmus_core.tracing import Span, TraceContext, Tracing
from isthmus_worker.engine import EngineRequest, FinishReason, LegReport, RequestType
from isthmus_worker.hub.leg_phases import agreed, emit_phases, phases
from isthmus_worker.hub.timelines import LegTimeline, Timelines
from kvtransfer.ports import RequestKey

_LEGS = {
    RequestType.CONTEXT_ONLY: "context",
    RequestType.GENERATION_ONLY: "generation",
    RequestType.CONTEXT_AND_GENERATION: "unsplit",
}
_SPANS = {"context": "worker.context", "generation": "worker.generation", "unsplit": "worker.request"}


class LegTelemetry:
    """Of one instance. One event loop owns it."""

    def __init__(self, tracing: Tracing, metrics: Metrics, timelines: Timelines, instance_id: str) -> None:
        self.tracing, self.metrics, self.timelines, self.instance_id = tracing, metrics, timelines, instance_id
        self.open: dict[RequestKey, LegSpan] = {}

    def begin(self, request: EngineRequest) -> LegSpan:
        """A leg has come."""
        return LegSpan(self, request)

    def reported(self, key: RequestKey, report: LegReport) -> None:
        """The engine is done with a leg, in whatever way; its consumer may have left long before."""
        leg = self.open.get(key)
        if leg is not None:
            leg.report = report
        elif (timeline := self.timelines.get(key)) is not None and not timeline.entries:
            for entry in phases(report, timeline.begin_ns, timeline.end_ns):
                timeline.note(entry)

    def handoff_ended(self, key: RequestKey, failure: str) -> None:
        """The hub tells the engine how a hand-off has ended that an open leg was waiting for; `failure`: why it did not
        come through, or ""."""
        leg = self.open.get(key)
        if leg is None:
            return
        leg.heard_ns = time.time_ns()
        if failure:
            leg.event("handoff_failed", failure)


class LegSpan:
    """An open leg. `context` is the parent for what it causes elsewhere."""

    def __init__(self, telemetry: LegTelemetry, request: EngineRequest) -> None:
        self._telemetry, self._request = telemetry, request
        self._leg = _LEGS[request.request_type]
        began_ns = time.time_ns()
        trace, peer = request.trace, _peer(request)
        trace_id = b"" if trace is None else trace.trace_id
        self._timeline = LegTimeline(request.key, self._leg, began_ns, len(request.prompt), trace_id, peer)
        self._span = self._open_span(request, began_ns, peer)
        self.context: TraceContext | None = self._span.context
        # What the engine has said, as soon as it has.
        self.report: LegReport | None = None
        # When its last hand-off ended, in Unix time.
        self.heard_ns: int | None = None
        # A second leg of the same key is refused; the first one's record stays.
        if request.key not in telemetry.open:
            telemetry.open[request.key] = self
            telemetry.timelines.open(self._timeline)

    def _open_span(self, request: EngineRequest, began_ns: int, peer: str) -> Span:
        telemetry = self._telemetry
        span = telemetry.tracing.begin(_SPANS[self._leg], request.trace, kind="server", start_ns=began_ns)
        if not span.recording:
            return span
        span.set("isthmus.request_id", str(request.key.request_id))
        span.set("isthmus.attempt", request.key.attempt)
        span.set("isthmus.instance_id", telemetry.instance_id)
        span.set("isthmus.prompt_tokens", len(request.prompt))
        span.set("isthmus.max_tokens", request.sampling.max_tokens)
        if peer:
            span.set("kv.peer.instance_id", peer)
        if request.request_type is not RequestType.CONTEXT_AND_GENERATION:
            at_once = request.context is not None or request.generation_waits
            span.set("isthmus.schedule", "generation_first" if at_once else "context_first")
        return span

    def event(self, name: str, reason: str) -> None:
        """Something went wrong now, and the leg goes on."""
        self._span.event(name, **{"isthmus.reason": reason})

    def succeed(self, report: LegReport, reasons: Collection[FinishReason]) -> None:
        """The leg has ended as it should. `reasons`: of the answers that ended in it; a context leg that holds its
        pages has none."""
        self.report = report
        names = sorted({reason.name.lower() for reason in reasons}) or ["handoff"]
        self._span.set("isthmus.finish_reason", ",".join(names))
        self._end("ok", "")

    def fail(self, outcome: str, reason: str) -> None:
        """The leg has failed, was cancelled, or ran out of time. `outcome`: the status code in lower case."""
        self._end(outcome, reason)

    def _end(self, outcome: str, reason: str) -> None:
        telemetry, timeline, report = self._telemetry, self._timeline, self.report
        end_ns = time.time_ns()
        timeline.end_ns, timeline.outcome, timeline.reason = end_ns, outcome, reason
        telemetry.metrics.add(metric.LEGS, 1, self._leg, outcome)
        if telemetry.open.get(self._request.key) is self:
            del telemetry.open[self._request.key]
        if report is not None:
            timeline.cached_tokens = report.cached_tokens
            entries = agreed(phases(report, timeline.begin_ns, end_ns), self.heard_ns)
            for entry in entries:
                timeline.note(entry)
            if self._span.recording:
                self._describe(report)
                emit_phases(telemetry.tracing, self._span, entries)
            self._count(report)
        if outcome != "ok":
            self._span.set("error.type", outcome)
        self._span.end(end_ns, error=None if outcome == "ok" else reason)

    def _describe(self, report: LegReport) -> None:
        span = self._span
        span.set("isthmus.cached_tokens", report.cached_tokens)
        span.set("isthmus.decode_tokens", report.decode_tokens)
        if report.handoff_failures:
            span.set("isthmus.handoff_failures", "; ".join(report.handoff_failures))
            span.set("isthmus.recomputed", report.recomputed)

    def _count(self, report: LegReport) -> None:
        metrics, leg = self._telemetry.metrics, self._leg
        queue_s = report.generation_queue if report.context_queue is None else report.context_queue
        if queue_s is not None:
            metrics.record(metric.QUEUE_TIME, queue_s, leg)
        if report.prefill is not None:
            metrics.record(metric.PREFILL_TIME, report.prefill)
        if report.decode is not None:
            metrics.record(metric.DECODE_TIME, report.decode)
            metrics.add(metric.DECODED_TOKENS, report.decode_tokens)
        if leg != "generation" and queue_s is not None:
            metrics.add(metric.PREFIX_QUERIES, len(self._request.prompt))
            metrics.add(metric.PREFIX_HITS, report.cached_tokens)
        if report.handoff is not None:
            metrics.record(metric.HANDOFF_TIME, report.handoff.total)
        if report.recomputed:
            metrics.add(metric.RECOMPUTED, 1)
        if retries := len(report.handoff_failures) - report.recomputed:
            metrics.add(metric.HANDOFF_RETRIES, retries)


def _peer(request: EngineRequest) -> str:
    if request.context_phase is not None:
        return request.context_phase.holder.instance_id
    return "" if request.context is None else request.context.instance_id
