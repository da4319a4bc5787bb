"""Spans of one leg: the leg itself, and its phases made from the engine's report when the leg is over.

Nothing but a clock is read while tokens flow.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from isthmus_core.tracing import TraceContext, Tracing
from isthmus_worker.engine import EngineRequest, FinishReason, LegReport, RequestType

_NAMES = {
    RequestType.CONTEXT_ONLY: "worker.context",
    RequestType.GENERATION_ONLY: "worker.generation",
    RequestType.CONTEXT_AND_GENERATION: "worker.request",
}


class LegSpan:
    """Open span of a leg. `context` is the parent for what the leg causes elsewhere; when the leg is not recorded here
    it is the caller's own."""

    def __init__(self, tracing: Tracing, request: EngineRequest, instance_id: str) -> None:
        self._tracing = tracing
        self._began_ns = time.time_ns()
        self._span = tracing.begin(
            _NAMES[request.request_type],
            request.trace,
            kind="server",
            start_ns=self._began_ns,
            attributes={
                "isthmus.request_id": request.key.request_id,
                "isthmus.attempt": request.key.attempt,
                "isthmus.instance_id": instance_id,
                "isthmus.prompt_tokens": len(request.prompt),
                "isthmus.max_tokens": request.sampling.max_tokens,
            },
        )
        if request.request_type is not RequestType.CONTEXT_AND_GENERATION:
            at_once = request.context is not None or request.generation_waits
            self._span.set("isthmus.schedule", "generation_first" if at_once else "context_first")
        self.context: TraceContext | None = self._span.context or request.trace

    def succeed(self, report: LegReport, reasons: Collection[FinishReason]) -> None:
        """The leg has ended as it should. `reasons`: of the answers that ended in it; a context leg that holds its
        pages has none."""
        if self._span.context is None:
            return
        end_ns = time.time_ns()
        for name, reported_ns, seconds in self._phases(report, end_ns):
            begin_ns = min(max(reported_ns, self._began_ns), end_ns)
            phase = self._tracing.begin(name, self._span.context, start_ns=begin_ns)
            if name == "decode":
                phase.set("isthmus.tokens", report.decode_tokens)
            phase.end(min(begin_ns + round(seconds * 1e9), end_ns))
        names = sorted({reason.name.lower() for reason in reasons}) or ["handoff"]
        self._span.set("isthmus.finish_reason", ",".join(names))
        self._span.set("isthmus.cached_tokens", report.cached_tokens)
        if report.handoff_failures:
            self._span.set("isthmus.handoff_failures", "; ".join(report.handoff_failures))
            self._span.set("isthmus.recomputed", report.recomputed)
        self._span.end(end_ns)

    def fail(self, reason: str) -> None:
        """The leg has failed, was cancelled, or ran out of time."""
        self._span.end(error=reason)

    def _phases(self, report: LegReport, end_ns: int) -> list[tuple[str, int, float]]:
        """(name, begin in Unix ns, seconds). The engine measures durations; a leg begins with its queue and ends with
        its decode."""
        phases: list[tuple[str, int, float]] = []
        queue_s = report.generation_queue if report.context_queue is None else report.context_queue
        if queue_s is not None:
            phases.append(("queue", self._began_ns, queue_s))
        if report.prefill is not None:
            phases.append(("prefill", self._began_ns + round((queue_s or 0) * 1e9), report.prefill))
        if report.decode is not None:
            phases.append(("decode", end_ns - round(report.decode * 1e9), report.decode))
        return phases
