"""`RequestReport` and its parts: durations are absent when a part did not happen."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from isthmus.v1 import generation_pb2

from isthmus_worker.engine import HandoffReport, LegReport
from kvtransfer.ports import HandoffStats
from kvtransfer.wire import handoff_report_from_pb, handoff_report_to_pb


def report_to_pb(report: LegReport) -> generation_pb2.RequestReport:
    """The engine's part of a report; the instance names are the caller's."""
    pb = generation_pb2.RequestReport(
        decode_tokens=report.decode_tokens,
        draft_tokens=report.draft_tokens,
        accepted_draft_tokens=report.accepted_draft_tokens,
        cached_tokens=report.cached_tokens,
        handoff_failures=report.handoff_failures,
        recomputed=report.recomputed,
    )
    durations = (
        (pb.context_queue, report.context_queue),
        (pb.prefill, report.prefill),
        (pb.generation_queue, report.generation_queue),
        (pb.decode, report.decode),
    )
    for field, seconds in durations:
        if seconds is not None:
            field.FromNanoseconds(round(seconds * 1e9))
            field.SetInParent()  # a duration of zero happened all the same
    if report.handoff is not None:
        pb.handoff.CopyFrom(handoff_report_to_pb(HandoffStats(report.handoff.stats, report.handoff.total)))
    return pb


def report_from_pb(pb: generation_pb2.RequestReport) -> LegReport:
    """Raises kvtransfer's WireError for negative durations of the hand-off."""
    handoff = None
    if pb.HasField("handoff"):
        stats = handoff_report_from_pb(pb.handoff, "report.handoff")
        handoff = HandoffReport(stats.writers, stats.total)
    return LegReport(
        context_queue=_seconds(pb.context_queue) if pb.HasField("context_queue") else None,
        prefill=_seconds(pb.prefill) if pb.HasField("prefill") else None,
        handoff=handoff,
        generation_queue=_seconds(pb.generation_queue) if pb.HasField("generation_queue") else None,
        decode=_seconds(pb.decode) if pb.HasField("decode") else None,
        decode_tokens=pb.decode_tokens,
        draft_tokens=pb.draft_tokens,
        accepted_draft_tokens=pb.accepted_draft_tokens,
        cached_tokens=pb.cached_tokens,
        handoff_failures=tuple(pb.handoff_failures),
        recomputed=pb.recomputed,
    )


def _seconds(value: Duration) -> float:
    return value.seconds + value.nanos / 1e9
