"""What the router adds to a request's report and to its root span."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from isthmus.v1.generation_pb2 import RequestReport

from isthmus_core.tracing import AttributeValue, Span
from isthmus_router.ports import FinishReason, Placement
from isthmus_router.requests import ChatInput, GenerateRequest


def attributes(request: GenerateRequest) -> dict[str, AttributeValue]:
    """Attributes of a request's root span that are known when it arrives (GenAI semantic conventions)."""
    chat = isinstance(request.input, ChatInput)
    known: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "chat" if chat else "text_completion",
        "gen_ai.provider.name": "isthmus",
        "gen_ai.request.model": request.model,
    }
    sampling = request.sampling
    asked: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "isthmus.client_request_id": request.label or None,
    }
    return known | {name: value for name, value in asked.items() if value is not None}


def describe_placement(span: Span, placement: Placement) -> None:
    """Set on a route span where the request goes, and why there."""
    span.set("isthmus.generation_instance", placement.generation.instance_id)
    if placement.context is not None:
        span.set("isthmus.context_instance", placement.context.instance_id)
    for name, value in placement.describe().items():
        span.set(name, value)


def complete(
    report: RequestReport,
    placement: Placement,
    handed_off: bool,
    route_s: float,
    first_token_s: float | None,
    total_s: float,
) -> None:
    """Add to the legs' report what the router knows and measured (seconds since the request arrived)."""
    report.route.CopyFrom(_duration(route_s))
    if first_token_s is not None:
        report.time_to_first_token.CopyFrom(_duration(first_token_s))
    report.total.CopyFrom(_duration(total_s))
    report.context_instance = (placement.context or placement.generation).instance_id
    if handed_off:
        report.generation_instance = placement.generation.instance_id


def describe(span: Span, reasons: Sequence[FinishReason], completion_tokens: int, report: RequestReport) -> None:
    """Set the root span's attributes of an answer that is complete."""
    span.set("gen_ai.usage.output_tokens", completion_tokens)
    span.set("gen_ai.response.finish_reasons", tuple(reason.name.lower() for reason in reasons))
    span.set("gen_ai.usage.cache_read.input_tokens", report.cached_tokens)
    if report.HasField("time_to_first_token"):
        span.set("gen_ai.response.time_to_first_chunk", report.time_to_first_token.ToNanoseconds() / 1e9)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration
