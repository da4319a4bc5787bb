"""timeline.proto as the hub answers it."""

from __future__ import annotations

from isthmus.v1 import timeline_pb2

from isthmus_worker.hub.timelines import Entry, LegTimeline
from isthmus_worker.marks import MarkKind
from isthmus_worker.wire.requests import key_to_pb


def timeline_to_pb(timeline: LegTimeline, instance_id: str) -> timeline_pb2.LegTimeline:
    """One leg."""
    return timeline_pb2.LegTimeline(
        key=key_to_pb(timeline.key),
        leg=timeline.leg,
        instance_id=instance_id,
        peer_instance_id=timeline.peer,
        trace_id=timeline.trace_id,
        begin_unix_ns=timeline.begin_ns,
        end_unix_ns=timeline.end_ns,
        outcome=timeline.outcome,
        reason=timeline.reason,
        entries=[_entry_to_pb(one) for one in timeline.entries],
        left_out=timeline.left_out,
        prompt_tokens=timeline.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
    )


def _entry_to_pb(entry: Entry) -> timeline_pb2.TimelineEntry:
    pb = timeline_pb2.TimelineEntry(
        kind=timeline_pb2.TimelineKind.Name(entry.kind.value),
        begin_unix_ns=entry.begin_ns,
        duration_ns=entry.duration_ns,
        src_rank=entry.ranks[0],
        dst_rank=entry.ranks[1],
        outcome=entry.outcome,
        reason=entry.reason,
    )
    if entry.kind is MarkKind.DECODE:
        pb.tokens = entry.tokens[1]
    else:
        pb.token_begin, pb.token_end = entry.tokens
    stats = entry.stats
    if stats is not None:
        pb.bytes, pb.descriptors, pb.path = stats.bytes, stats.descriptors, stats.path
        parts = {"queue": stats.queue, "plan": stats.plan, "post": stats.post, "wire": stats.wire}
        for name, seconds in parts.items():
            setattr(pb.parts, f"{name}_ns", round(seconds * 1e9))
    return pb
