"""The phases of a leg: from the engine's report to entries in Unix time, and from those to spans."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from isthmus_worker.hub.timelines import Entry
from isthmus_worker.marks import MarkKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_core.tracing import Span, TraceContext, Tracing
    from isthmus_worker.engine import LegReport
    from isthmus_worker.marks import Mark

_SPAN_NAMES = {MarkKind.QUEUE: "queue", MarkKind.CONSENSUS: "consensus", MarkKind.DECODE: "decode"}
# Moments of the engine are told in Unix time when its report comes: the two clocks may have drifted meanwhile.
_CLOCKS_APART_NS = 1_000_000
_EVENT_NAMES = {MarkKind.FIRST_TOKEN: "first_token", MarkKind.PREEMPTED: "preempted"}


def phases(report: LegReport, began_ns: int, end_ns: int) -> list[Entry]:
    """What the engine says about a leg that the hub had from `began_ns` to `end_ns` (Unix time): its marks, or, of an
    engine that keeps none, its durations."""
    if not report.marks:
        return _from_durations(report, began_ns, end_ns)
    # Hub and engine read the same monotonic clock.
    offset_ns = time.time_ns() - time.monotonic_ns()
    return [_entry(mark, offset_ns, report) for mark in report.marks]


def _entry(mark: Mark, offset_ns: int, report: LegReport) -> Entry:
    tokens = (0, report.decode_tokens) if mark.kind is MarkKind.DECODE else (mark.begin, mark.end)
    return Entry(mark.kind, round(mark.at * 1e9) + offset_ns, max(0, round(mark.seconds * 1e9)), tokens)


def _from_durations(report: LegReport, began_ns: int, end_ns: int) -> list[Entry]:
    """A leg begins with its queue and ends with its decode; no phase is told beyond the leg."""
    queue_s = report.generation_queue if report.context_queue is None else report.context_queue
    after_queue_ns = min(began_ns + _ns(queue_s or 0.0), end_ns)
    entries: list[Entry] = []
    if queue_s is not None:
        entries.append(Entry(MarkKind.QUEUE, began_ns, after_queue_ns - began_ns))
    if report.prefill is not None:
        entries.append(Entry(MarkKind.PREFILL_CHUNK, after_queue_ns, min(_ns(report.prefill), end_ns - after_queue_ns)))
    if report.decode is not None:
        decode_ns = min(_ns(report.decode), end_ns - began_ns)
        entries.append(Entry(MarkKind.DECODE, end_ns - decode_ns, decode_ns, (0, report.decode_tokens)))
    return entries


def agreed(entries: Sequence[Entry], heard_ns: int | None) -> list[Entry]:
    """The phases with one more, `consensus`: from `heard_ns`, when the hub knew how the last hand-off had ended, to the
    step in which all ranks act on it. That step is numbered and the same for all: it is their agreement."""
    if heard_ns is None:
        return list(entries)
    acts = (MarkKind.PREFILL_CHUNK, MarkKind.DECODE)
    for index, entry in enumerate(entries):
        if entry.kind in acts and entry.begin_ns >= heard_ns - _CLOCKS_APART_NS:
            took_ns = max(0, entry.begin_ns - heard_ns)
            return [*entries[:index], Entry(MarkKind.CONSENSUS, heard_ns, took_ns), *entries[index:]]
    return list(entries)  # the leg has ended before any step


def emit_phases(tracing: Tracing, leg: Span, entries: Sequence[Entry]) -> None:
    """One span for each entry, children of the leg's; chunks that follow each other are children of one `prefill`, and
    each is linked to the one before. Moments become events of the leg."""
    chunks: list[Entry] = []
    for entry in entries:
        if entry.kind is MarkKind.PREFILL_CHUNK:
            chunks.append(entry)
            continue
        if chunks:
            _emit_prefill(tracing, leg, chunks)
            chunks = []
        if entry.kind in _EVENT_NAMES:
            leg.event_at(entry.begin_ns, _EVENT_NAMES[entry.kind])
        else:
            span = tracing.begin(_SPAN_NAMES[entry.kind], leg.context, start_ns=entry.begin_ns)
            if entry.kind is MarkKind.DECODE:
                span.set("isthmus.tokens", entry.tokens[1])
            span.end(entry.end_ns)
    if chunks:
        _emit_prefill(tracing, leg, chunks)


def _emit_prefill(tracing: Tracing, leg: Span, chunks: Sequence[Entry]) -> None:
    prefill = tracing.begin("prefill", leg.context, start_ns=chunks[0].begin_ns)
    prefill.set("isthmus.chunks", len(chunks))
    before: TraceContext | None = None
    for number, chunk in enumerate(chunks):
        links = () if before is None else (before,)
        span = tracing.begin("prefill.chunk", prefill.context, start_ns=chunk.begin_ns, links=links)
        span.set("isthmus.chunk", number)
        span.set("isthmus.token_begin", chunk.tokens[0])
        span.set("isthmus.token_end", chunk.tokens[1])
        span.end(chunk.end_ns)
        before = span.context
    prefill.end(chunks[-1].end_ns)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
