"""Where the time of one request went: the report of the wire as plain values, and as a table for people."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from isthmus.v1 import generation_pb2
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Handoff:
    """How the KV cache moved. Times in seconds; `wire_s` is the write itself, `total_s` what the request waited."""

    bytes: int
    descriptors: int
    path: str
    total_s: float | None
    queue_s: float | None
    plan_s: float | None
    post_s: float | None
    wire_s: float | None

    @property
    def gigabytes_per_s(self) -> float | None:
        """Payload over the time of the write; None when nothing was measured."""
        return self.bytes / self.wire_s / 1e9 if self.wire_s else None


@dataclass(frozen=True, slots=True)
class Timeline:
    """Times of one request in seconds; None = the phase did not happen."""

    route_s: float | None
    context_queue_s: float | None
    prefill_s: float | None
    handoff: Handoff | None
    generation_queue_s: float | None
    decode_s: float | None
    decode_tokens: int
    time_to_first_token_s: float | None
    total_s: float | None
    context_instance: str
    generation_instance: str

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens of decode steps over their time; None when there was no decode step."""
        return self.decode_tokens / self.decode_s if self.decode_s and self.decode_tokens else None


def _seconds(present: bool, duration: Duration) -> float | None:
    return duration.ToNanoseconds() / 1e9 if present else None


def timeline_from_report(report: generation_pb2.RequestReport) -> Timeline:
    """Values of a RequestReport."""
    handoff = None
    if report.HasField("handoff"):
        part = report.handoff
        handoff = Handoff(
            bytes=part.bytes,
            descriptors=part.descriptors,
            path=part.path,
            total_s=_seconds(part.HasField("total"), part.total),
            queue_s=_seconds(part.HasField("queue"), part.queue),
            plan_s=_seconds(part.HasField("plan"), part.plan),
            post_s=_seconds(part.HasField("post"), part.post),
            wire_s=_seconds(part.HasField("wire"), part.wire),
        )
    return Timeline(
        route_s=_seconds(report.HasField("route"), report.route),
        context_queue_s=_seconds(report.HasField("context_queue"), report.context_queue),
        prefill_s=_seconds(report.HasField("prefill"), report.prefill),
        handoff=handoff,
        generation_queue_s=_seconds(report.HasField("generation_queue"), report.generation_queue),
        decode_s=_seconds(report.HasField("decode"), report.decode),
        decode_tokens=report.decode_tokens,
        time_to_first_token_s=_seconds(report.HasField("time_to_first_token"), report.time_to_first_token),
        total_s=_seconds(report.HasField("total"), report.total),
        context_instance=report.context_instance,
        generation_instance=report.generation_instance,
    )


def milliseconds(seconds: float | None) -> str:
    """`1.23 ms`, or a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def mebibytes(count: int) -> str:
    """`1.50 MiB`; small counts as KiB."""
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def render_timeline(timeline: Timeline) -> Table:
    """The timeline in the order of the request's life."""
    table = Table(title="Where the time went", title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("phase")
    table.add_column("time", justify="right")
    table.add_column("where and how", overflow="fold")
    context = timeline.context_instance or timeline.generation_instance
    table.add_row("route", milliseconds(timeline.route_s), "router: tokenise, ask for a placement")
    table.add_row("queue", milliseconds(timeline.context_queue_s), context)
    table.add_row("prefill", milliseconds(timeline.prefill_s), context)
    table.add_row("first token", milliseconds(timeline.time_to_first_token_s), "since the request came in")
    if timeline.generation_queue_s is not None:
        table.add_row("queue", milliseconds(timeline.generation_queue_s), timeline.generation_instance)
    _add_handoff(table, timeline)
    if timeline.decode_s is not None:
        speed = timeline.decode_tokens_per_s
        note = f"{timeline.generation_instance}: {timeline.decode_tokens} tokens"
        table.add_row("decode", milliseconds(timeline.decode_s), f"{note}, {speed:.1f} tokens/s" if speed else note)
    table.add_row("total", milliseconds(timeline.total_s), "")
    return table


def _add_handoff(table: Table, timeline: Timeline) -> None:
    handoff = timeline.handoff
    if handoff is None:
        return
    speed = handoff.gigabytes_per_s
    what = f"{mebibytes(handoff.bytes)} in {handoff.descriptors} descriptors over {handoff.path}"
    pair = f"{timeline.context_instance} -> {timeline.generation_instance}"
    table.add_row("hand-off", milliseconds(handoff.total_s), f"{pair}: {what}")
    table.add_row("  queue", milliseconds(handoff.queue_s), "asked for, until a rank took the order")
    table.add_row("  plan", milliseconds(handoff.plan_s), "computing addresses")
    table.add_row("  wire", milliseconds(handoff.wire_s), f"{speed:.2f} GB/s" if speed else "")
