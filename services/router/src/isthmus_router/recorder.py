"""What a router counts and logs about requests: one line for each one that ends, and its metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from isthmus_core.logs import about
from isthmus_core.metrics import NO_METRICS, Metrics
from isthmus_core.metrics import services as metric
from isthmus_router.preparation import split_adapter
from isthmus_router.requests import ChatInput, TextInput

if TYPE_CHECKING:
    from isthmus_core.errors import IsthmusError
    from isthmus_core.keys import RequestKey
    from isthmus_core.trace_context import TraceContext
    from isthmus_router.requests import End, GenerateRequest

logger = logging.getLogger(__name__)

# Codes of requests that were turned away before anything was computed.
_REFUSED = frozenset(
    {"invalid_argument", "not_found", "already_exists", "resource_exhausted", "permission_denied", "unauthenticated"}
)
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


class RequestRecorder:
    """Takes what is known when a request is over: nothing is done while its tokens flow.

    `models`: the names that metrics tell apart. `log_prompts`: also log what was asked.
    """

    def __init__(
        self, metrics: Metrics = NO_METRICS, models: Collection[str] = (), *, log_prompts: bool = False
    ) -> None:
        self._metrics, self._models, self._log_prompts = metrics, models, log_prompts

    def watch(self, running: Callable[[], int], connected: Callable[[], bool]) -> None:
        """Requests in flight and the stream to the coordinator, whenever metrics are collected."""
        self._metrics.observe(metric.IN_FLIGHT, running)
        self._metrics.observe(metric.COORDINATOR_CONNECTED, lambda: float(connected()))

    def retried(self, reason: str) -> None:
        """A request goes on elsewhere."""
        self._metrics.add(metric.RETRIES, 1, reason)

    def refused(self, error: IsthmusError) -> None:
        """Something was refused before it was a request: no key, a body that is none, a connection too many."""
        self._metrics.add(metric.REFUSALS, 1, kind_of(error))

    def begin(self, request: GenerateRequest, trace: TraceContext | None) -> RequestRecord:
        """A request has arrived."""
        return RequestRecord(self, request, trace)

    def count(self, record: RequestRecord, outcome: str, end: End | None, failure: IsthmusError | None) -> None:
        """A request is over: its metrics and its line."""
        model = record.request.model or next(iter(self._models), "")
        base, _ = split_adapter(model, self._models)
        label = base if base in self._models else "unknown"
        self._metrics.add(metric.REQUESTS, 1, label, outcome)
        if record.fell_back:
            self._metrics.add(metric.SCHEDULE_FALLBACKS, 1)
        if failure is not None and outcome in _REFUSED:
            self._metrics.add(metric.REFUSALS, 1, kind_of(failure))
        if end is not None:
            self._count(label, end)
        self._log(record, model, outcome, end, failure)

    def _count(self, model: str, end: End) -> None:
        metrics, report = self._metrics, end.report
        total = _seconds(report.total)
        metrics.add(metric.PROMPT_TOKENS, end.prompt_tokens, model)
        metrics.add(metric.GENERATION_TOKENS, end.completion_tokens, model)
        metrics.record(metric.REQUEST_PROMPT_TOKENS, end.prompt_tokens)
        metrics.record(metric.REQUEST_GENERATION_TOKENS, end.completion_tokens)
        metrics.record(metric.REQUEST_LATENCY, total, model)
        metrics.record(metric.ROUTE_TIME, _seconds(report.route), model)
        if report.HasField("time_to_first_token"):
            first = _seconds(report.time_to_first_token)
            metrics.record(metric.TIME_TO_FIRST_TOKEN, first, model)
            if end.completion_tokens > 1:
                metrics.record(metric.TIME_PER_OUTPUT_TOKEN, (total - first) / (end.completion_tokens - 1), model)

    def _log(
        self, record: RequestRecord, model: str, outcome: str, end: End | None, failure: IsthmusError | None
    ) -> None:
        level = logging.INFO if outcome in ("ok", "cancelled") or outcome in _REFUSED else logging.WARNING
        if not logger.isEnabledFor(level):
            return
        request, trace = record.request, record.trace
        extra: dict[str, object] = {"operation": request.operation, "model": model, "outcome": outcome}
        if record.key is not None:
            extra |= about(record.key, trace)
        elif trace is not None:
            extra["trace_id"] = trace.trace_id.hex()
        if request.label:
            extra["client_request_id"] = request.label
        if end is not None:
            report = end.report
            extra |= {
                "prompt_tokens": end.prompt_tokens,
                "cached_tokens": end.cached_tokens,
                "completion_tokens": end.completion_tokens,
                "total_ms": round(_seconds(report.total) * 1e3, 1),
                "context_instance": report.context_instance,
                "generation_instance": report.generation_instance,
            }
        if failure is not None:
            extra["error"] = failure.message
        if record.retries:
            extra["retries"] = ",".join(record.retries)
        if self._log_prompts:
            extra["prompt"] = _text(request)
        logger.log(level, "request ended", extra=extra)


class RequestRecord:
    """One request. `key`: as soon as it has one; `retries`: a word for what ended each attempt but the last;
    `fell_back`: it was served context_first although generation_first was wanted."""

    __slots__ = ("_recorder", "fell_back", "key", "request", "retries", "trace")

    def __init__(self, recorder: RequestRecorder, request: GenerateRequest, trace: TraceContext | None) -> None:
        self._recorder = recorder
        self.request, self.trace = request, trace
        self.key: RequestKey | None = None
        self.retries: Sequence[str] = ()
        self.fell_back = False

    def ended(self, end: End | None, failure: IsthmusError | None) -> None:
        """With its end, with a failure, or with neither when the client has left."""
        outcome = "ok" if end is not None else "cancelled" if failure is None else failure.code.name.lower()
        self._recorder.count(self, outcome, end, failure)


def kind_of(error: IsthmusError) -> str:
    """A word for what went wrong: the name of the typed detail, which crosses the wire, or of the status code."""
    if error.word:
        return error.word
    if error.detail is None:
        return error.code.name.lower()
    return _WORD.sub("_", error.detail.DESCRIPTOR.name).lower()


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _text(request: GenerateRequest) -> str:
    match request.input:
        case TextInput(text):
            return text
        case ChatInput(chat):
            return str(chat)
        case tokens:
            return str(list(tokens.ids))
