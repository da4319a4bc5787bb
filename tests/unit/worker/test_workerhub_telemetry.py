"""Legs and hand-offs as spans, metrics and timelines, from the reports that pass through the hub."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from isthmus_core.keys import RequestKey
from isthmus_core.metrics import Metrics
from isthmus_core.tracing import TraceContext, Tracing
from isthmus_worker.engine import EngineRequest, FinishReason, HandoffReport, LegReport, RequestType, Sampling
from isthmus_worker.hub.leg_telemetry import LegTelemetry
from isthmus_worker.hub.timelines import MAX_ENTRIES, Entry, LegTimeline, Timelines
from isthmus_worker.hub.transfer_telemetry import TransferTelemetry
from isthmus_worker.marks import MAX_MARKS, Mark, MarkKind, add_chunk, marks_from_pb, marks_to_pb
from kvtransfer.control.pairs import PairState, PairStatus
from kvtransfer.ports import (
    HandoffStats,
    ReceiveOutcome,
    SendOutcome,
    TransferFailure,
    TransferNotice,
    TransferStats,
    WriterOutcome,
)

BASE = 1 << 40
TRACE = TraceContext(b"\7" * 16, b"\5" * 8)
STATS = TransferStats(bytes=4096, descriptors=4, path="nixl/x", queue=0.001, plan=0.002, post=0.0005, wire=0.004)


def request(number: int = 0, kind: RequestType = RequestType.CONTEXT_ONLY, trace: TraceContext | None = TRACE):
    return EngineRequest(RequestKey(BASE + number, 0), kind, tuple(range(40)), Sampling(8), trace=trace)


class Site:
    def __init__(self, capacity: int = 100) -> None:
        self.exporter, self.registry = InMemorySpanExporter(), CollectorRegistry()
        self.tracing = Tracing(self.exporter, "isthmus-worker", {})
        self.timelines = Timelines(capacity)
        self.legs = LegTelemetry(self.tracing, Metrics(self.registry), self.timelines, "w-0")
        self.transfers = TransferTelemetry(self.legs)

    def spans(self) -> dict[str, list[Any]]:
        self.tracing.flush()
        found: dict[str, list[Any]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture(name="site")
def _site():
    site = Site()
    yield site
    assert site.tracing.open_spans() == 0
    site.tracing.shutdown()


def chunked(now: float) -> LegReport:
    marks = (
        Mark(MarkKind.QUEUE, now - 0.9, 0.1),
        Mark(MarkKind.PREFILL_CHUNK, now - 0.8, 0.2, 0, 16),
        Mark(MarkKind.PREFILL_CHUNK, now - 0.6, 0.2, 16, 40),
        Mark(MarkKind.PREEMPTED, now - 0.4),
        Mark(MarkKind.PREFILL_CHUNK, now - 0.35, 0.05, 0, 40),
        Mark(MarkKind.FIRST_TOKEN, now - 0.3),
        Mark(MarkKind.DECODE, now - 0.3, 0.25),
    )
    return LegReport(context_queue=0.1, prefill=0.4, decode=0.25, decode_tokens=5, cached_tokens=16, marks=marks)


def test_the_phases_of_a_leg_become_spans_events_and_a_timeline(site: Site):
    leg = site.legs.begin(request(kind=RequestType.CONTEXT_AND_GENERATION))
    site.legs.reported(request().key, chunked(time.monotonic()))
    leg.succeed(chunked(time.monotonic()), [FinishReason.STOP, FinishReason.LENGTH])
    spans = site.spans()
    (span,) = spans["worker.request"]
    assert span.attributes["isthmus.finish_reason"] == "length,stop"
    assert span.attributes["isthmus.cached_tokens"] == 16
    assert [event.name for event in span.events] == ["preempted", "first_token"]
    first, again = spans["prefill"]
    assert [one.attributes["isthmus.chunks"] for one in (first, again)] == [2, 1], "a preempted prompt is computed anew"
    one, two, three = spans["prefill.chunk"]
    assert [chunk.parent.span_id for chunk in (one, two, three)] == [first.context.span_id] * 2 + [
        again.context.span_id
    ]
    assert [link.context.span_id for link in two.links] == [one.context.span_id]
    assert not three.links
    assert abs(first.start_time - (time.time_ns() - 800_000_000)) < 200_000_000, "monotonic marks are told in Unix time"
    assert spans["decode"][0].attributes["isthmus.tokens"] == 5
    (timeline,) = site.timelines.of(BASE)
    assert [entry.kind for entry in timeline.entries] == [mark.kind for mark in chunked(0).marks]
    assert (timeline.outcome, timeline.cached_tokens, timeline.trace_id) == ("ok", 16, TRACE.trace_id)
    assert site.value("isthmus_legs_total", leg="unsplit", outcome="ok") == 1
    assert site.value("isthmus_request_queue_time_seconds_sum", leg="unsplit") == pytest.approx(0.1)
    assert site.value("isthmus_decoded_tokens_total") == 5
    assert site.value("isthmus_prefix_cache_queries_total") == 40
    assert site.value("isthmus_prefix_cache_hits_total") == 16


def test_an_engine_without_marks_has_phases_all_the_same(site: Site):
    leg = site.legs.begin(request())
    leg.succeed(LegReport(context_queue=0.0, prefill=0.5), [])
    spans = site.spans()
    (span,) = spans["worker.context"]
    assert span.attributes["isthmus.finish_reason"] == "handoff"
    assert set(spans) == {"worker.context", "queue", "prefill", "prefill.chunk"}
    (chunk,) = spans["prefill.chunk"]
    assert span.start_time <= chunk.start_time <= chunk.end_time <= span.end_time, "no longer than the leg itself"


def test_a_failed_leg_shows_how_far_it_came(site: Site):
    key = request().key
    leg = site.legs.begin(request())
    site.legs.reported(key, LegReport(marks=(Mark(MarkKind.QUEUE, time.monotonic(), 0.2),)))
    leg.fail("unavailable", "instance lost")
    spans = site.spans()
    (span,) = spans["worker.context"]
    assert (span.status.description, span.attributes["error.type"]) == ("instance lost", "unavailable")
    assert "queue" in spans
    (timeline,) = site.timelines.of(BASE)
    assert (timeline.outcome, timeline.reason) == ("unavailable", "instance lost")
    assert len(timeline.entries) == 1
    assert not site.legs.open


def test_the_report_of_a_leg_whose_caller_left_completes_its_timeline(site: Site):
    leg = site.legs.begin(request())
    leg.fail("cancelled", "the caller went away")
    site.legs.reported(request().key, chunked(time.monotonic()))
    site.legs.reported(request(number=9).key, chunked(time.monotonic()))  # never heard of: nothing happens
    (timeline,) = site.timelines.of(BASE)
    assert len(timeline.entries) == 7


def test_what_is_not_sampled_is_counted_and_remembered(site: Site):
    leg = site.legs.begin(request(trace=replace(TRACE, flags=0)))
    assert leg.context == replace(TRACE, flags=0)
    leg.succeed(chunked(time.monotonic()), [])
    assert site.spans() == {}
    assert site.value("isthmus_legs_total", leg="context", outcome="ok") == 1
    assert len(site.timelines.of(BASE)) == 1


def test_a_duplicate_leaves_the_live_leg_alone(site: Site):
    leg = site.legs.begin(request())
    twin = site.legs.begin(request())
    twin.fail("already_exists", "request is being served")
    assert site.legs.open == {request().key: leg}
    leg.succeed(LegReport(), [])
    (timeline,) = site.timelines.of(BASE)
    assert timeline.outcome == "ok"
    assert not site.legs.open


def test_hand_offs_that_fail_are_counted_once_and_told_to_the_leg(site: Site):
    key = request().key
    leg = site.legs.begin(request(kind=RequestType.GENERATION_ONLY))
    failed = ReceiveOutcome(key, settled=False, failure=TransferFailure.TIMED_OUT, reason="no word for 30 s")
    site.transfers.to_scheduler(failed)
    site.transfers.to_scheduler(replace(failed, settled=True))
    site.transfers.to_scheduler(ReceiveOutcome(key, settled=True, stats=HandoffStats(STATS, 0.01)))
    report = LegReport(handoff=HandoffReport(STATS, 0.01), handoff_failures=("no word for 30 s",))
    leg.succeed(report, [FinishReason.STOP])
    assert site.value("isthmus_handoffs_total", outcome="timed_out") == 1
    assert site.value("isthmus_handoffs_total", outcome="delivered") == 1
    assert site.value("isthmus_handoff_retries_total") == 1
    assert site.value("isthmus_recomputed_requests_total") == 0
    (span,) = site.spans()["worker.generation"]
    assert [(event.name, event.attributes["isthmus.reason"]) for event in span.events] == [
        ("handoff_failed", "no word for 30 s")
    ]
    assert span.attributes["isthmus.handoff_failures"] == "no word for 30 s"
    kinds = [(entry.kind, entry.outcome) for entry in site.timelines.of(BASE)[0].entries]
    assert kinds == [(MarkKind.RECEIVE, "timed_out"), (MarkKind.RECEIVE, "delivered")]


def test_consensus_is_from_the_end_of_the_hand_off_to_the_step_that_acts_on_it(site: Site):
    key = request().key
    leg = site.legs.begin(request(kind=RequestType.GENERATION_ONLY))
    failed = ReceiveOutcome(key, settled=True, failure=TransferFailure.TIMED_OUT)
    site.transfers.to_scheduler(failed)
    site.transfers.to_scheduler(ReceiveOutcome(key, settled=True, stats=HandoffStats(STATS, 0.01)))
    now = time.monotonic()
    marks = (Mark(MarkKind.QUEUE, now - 1, 0.5), Mark(MarkKind.DECODE, now + 0.25, 0.5))
    leg.succeed(LegReport(marks=marks), [FinishReason.STOP])
    spans = site.spans()
    (agreed,), (decode,) = spans["consensus"], spans["decode"]
    assert agreed.end_time == decode.start_time
    assert abs(agreed.end_time - agreed.start_time - 250_000_000) < 50_000_000
    kinds = [entry.kind for entry in site.timelines.of(BASE)[0].entries]
    assert kinds == [MarkKind.RECEIVE, MarkKind.RECEIVE, MarkKind.QUEUE, MarkKind.CONSENSUS, MarkKind.DECODE]


def test_no_consensus_when_nobody_acts_or_nothing_was_handed_off(site: Site):
    key = request().key
    leg = site.legs.begin(request(kind=RequestType.GENERATION_ONLY))
    site.transfers.to_scheduler(ReceiveOutcome(key, settled=True, failure=TransferFailure.TIMED_OUT))
    leg.fail("unavailable", "given up")
    site.legs.begin(request(1)).succeed(chunked(time.monotonic()), [FinishReason.STOP])
    assert "consensus" not in site.spans()


def test_recomputed_is_not_a_retry(site: Site):
    leg = site.legs.begin(request(kind=RequestType.GENERATION_ONLY))
    leg.succeed(LegReport(handoff_failures=("a", "b"), recomputed=True), [FinishReason.STOP])
    assert site.value("isthmus_handoff_retries_total") == 1
    assert site.value("isthmus_recomputed_requests_total") == 1


def test_writes_are_counted_by_path_and_mode(site: Site, caplog: pytest.LogCaptureFixture):
    key = request().key
    site.legs.begin(request()).succeed(LegReport(), [])
    for stats in (STATS, STATS._replace(bounced=1024, predicted=0.0035), STATS._replace(path="nixl/ucx tcp")):
        site.transfers.notice(TransferNotice(key, 1, 2, WriterOutcome.DELIVERED, stats=stats))
    site.transfers.notice(TransferNotice(key, 1, 2, WriterOutcome.NEVER_STARTED, reason="cancelled"))
    assert site.value("isthmus_transfer_bytes_total", path="nixl/x", mode="direct") == 4096 + 3072
    assert site.value("isthmus_transfer_bytes_total", path="nixl/x", mode="bounced") == 1024
    assert site.value("isthmus_transfer_descriptors_total", path="nixl/x") == 8
    assert site.value("isthmus_transfer_time_seconds_count", path="nixl/x", phase="wire") == 2
    assert site.value("isthmus_transfer_time_seconds_sum", path="nixl/x", phase="plan") == pytest.approx(0.004)
    assert site.value("isthmus_transfer_rate_bytes_per_second_sum", path="nixl/ucx tcp") == pytest.approx(4096 / 0.004)
    assert site.value("isthmus_transfer_cost_error_ratio_sum", mode="bounced") == pytest.approx(2.0)
    assert site.value("isthmus_transfers_total", path="none", mode="direct", outcome="never_started") == 1
    said = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert ("WARNING", "caches move over nixl/ucx tcp") in said
    assert len([text for _, text in said if "nixl/x" in text]) <= 1, "a way is told once"
    entries = site.timelines.of(BASE)[0].entries
    assert [entry.ranks for entry in entries] == [(1, 2)] * 4
    assert entries[-1].reason == "cancelled"


def test_offers_and_pairs(site: Site):
    site.transfers.to_scheduler(SendOutcome(request().key))
    site.transfers.to_scheduler(SendOutcome(request().key, TransferFailure.EXPIRED, "held for 30 s"))
    assert site.value("isthmus_offers_total", outcome="delivered") == 1
    assert site.value("isthmus_offers_total", outcome="expired") == 1
    for state in (PairState.CONNECTING, PairState.READY, PairState.CONNECTING, PairState.READY):
        site.transfers.pair(PairStatus("c-0", b"x", state))
    assert site.value("isthmus_stream_breaks_total") == 1


def test_the_ring_forgets_the_oldest_and_bounds_each_leg():
    ring = Timelines(3)
    for number in range(5):
        ring.open(LegTimeline(RequestKey(BASE + number, 0), "context", number, 1))
    ring.open(LegTimeline(RequestKey(BASE + 4, 1), "context", 9, 1))
    assert [one.begin_ns for one in ring.latest(2)] == [9, 4]
    assert [one.key.attempt for one in ring.of(BASE + 4)] == [0, 1]
    assert ring.of(BASE) == []
    leg = ring.of(BASE + 4)[0]
    for _ in range(MAX_ENTRIES + 7):
        leg.note(Entry(MarkKind.QUEUE, 0))
    assert (len(leg.entries), leg.left_out) == (MAX_ENTRIES, 7)
    off = Timelines(0)
    off.open(leg)
    assert off.latest(9) == []


def test_marks_cross_the_wire_and_are_bounded():
    marks: list[Mark] = []
    for number in range(MAX_MARKS + 100):
        add_chunk(marks, number * 8, number * 8 + 8, float(number), number + 0.5)
    assert len(marks) == MAX_MARKS
    last = marks[-1]
    assert (last.begin, last.end) == ((MAX_MARKS - 1) * 8, (MAX_MARKS + 100) * 8), "the last chunks are told as one"
    assert last.at + last.seconds == MAX_MARKS + 99.5
    assert marks_from_pb(marks_to_pb(marks)) == tuple(marks)
