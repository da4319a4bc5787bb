"""Spans of a hand-off: names and attributes in one place. The machines only stamp; see isthmus_core.tracing.

kv.receive   generation hub, from the request for the cache to its settled outcome
kv.transfer  context hub, one per (src_rank, dst_rank), child of kv.receive
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.ports import TransferFailure, WriterOutcome

if TYPE_CHECKING:
    from isthmus_core.tracing import AttributeValue, Span, TraceContext, Tracing
    from kvtransfer.ports import ReceiveOutcome, ReceiveRequest, RequestKey, TransferNotice, TransferStats

RECEIVE_SPAN = "kv.receive"
TRANSFER_SPAN = "kv.transfer"

REQUEST_ID = "isthmus.request_id"
ATTEMPT = "isthmus.attempt"
PEER = "kv.peer.instance_id"
PEER_INCARNATION = "kv.peer.incarnation"
TOKENS = "kv.tokens"
SRC_RANK = "kv.src_rank"
DST_RANK = "kv.dst_rank"
BYTES = "kv.bytes"
DESCRIPTORS = "kv.descriptors"
PATH = "kv.path"
MODE = "kv.mode"
BOUNCED_BYTES = "kv.bounced_bytes"
PREDICTED_MS = "kv.predicted_ms"
QUEUE_MS = "kv.queue_ms"
PLAN_MS = "kv.plan_ms"
POST_MS = "kv.post_ms"
WIRE_MS = "kv.wire_ms"
CREDIT_MS = "kv.credit_ms"
GATHER_MS = "kv.gather_ms"
SCATTER_MS = "kv.scatter_ms"
WHY = "kv.why"
TOTAL_MS = "kv.total_ms"
OUTCOME = "kv.outcome"
REASON = "kv.reason"


def begin_receive(tracing: Tracing, request: ReceiveRequest) -> Span:
    """Opens `kv.receive`; its context is the parent of the writers' spans."""
    if not tracing.records(request.trace):
        return tracing.begin(RECEIVE_SPAN, request.trace, kind="client")
    attributes = _identity(request.key, request.holder.instance_id, request.holder.incarnation)
    attributes[TOKENS] = len(request.tokens)
    return tracing.begin(RECEIVE_SPAN, request.trace, kind="client", attributes=attributes)


def end_receive(span: Span, outcome: ReceiveOutcome) -> None:
    """Ends `kv.receive` with the settled outcome."""
    if not span.recording:
        return
    if outcome.stats is not None:
        writers = outcome.stats.writers
        span.set(BYTES, writers.bytes)
        span.set(DESCRIPTORS, writers.descriptors)
        span.set(PATH, writers.path)
        span.set(MODE, _mode(writers))
        span.set(WHY, writers.why)
        if writers.bounced:
            span.set(SCATTER_MS, writers.scatter * 1e3)
        span.set(TOTAL_MS, outcome.stats.total * 1e3)
    failed = outcome.failure is not TransferFailure.NONE
    span.set(OUTCOME, outcome.failure.name.lower() if failed else "delivered")
    span.end(error=outcome.reason or outcome.failure.name if failed else None)


def begin_transfer(
    tracing: Tracing, parent: TraceContext | None, key: RequestKey, peer: tuple[str, bytes], writer: tuple[int, int]
) -> Span:
    """Opens `kv.transfer` of one (src_rank, dst_rank)."""
    if not tracing.records(parent):
        return tracing.begin(TRANSFER_SPAN, parent, kind="server")
    attributes = _identity(key, *peer)
    attributes[SRC_RANK], attributes[DST_RANK] = writer
    return tracing.begin(TRANSFER_SPAN, parent, kind="server", attributes=attributes)


def end_transfer(span: Span, notice: TransferNotice) -> None:
    """Ends `kv.transfer` with the writer's notice."""
    if not span.recording:
        return
    stats = notice.stats
    span.set(BYTES, stats.bytes)
    span.set(DESCRIPTORS, stats.descriptors)
    span.set(PATH, stats.path)
    span.set(MODE, _mode(stats))
    span.set(WHY, stats.why)
    if stats.bounced:
        span.set(BOUNCED_BYTES, stats.bounced)
        span.set(CREDIT_MS, stats.credit * 1e3)
        span.set(GATHER_MS, stats.gather * 1e3)
    if stats.predicted:
        span.set(PREDICTED_MS, stats.predicted * 1e3)
    for name, seconds in ((QUEUE_MS, stats.queue), (PLAN_MS, stats.plan), (POST_MS, stats.post), (WIRE_MS, stats.wire)):
        span.set(name, seconds * 1e3)
    span.set(OUTCOME, notice.outcome.name.lower())
    failed = notice.outcome is not WriterOutcome.DELIVERED
    if failed:
        span.set(REASON, notice.reason)
    span.end(error=notice.reason or notice.outcome.name if failed else None)


def _mode(stats: TransferStats) -> str:
    """How the bytes went: each piece by itself, through the bounce arena, or some this way and some that."""
    if not stats.bounced:
        return "direct"
    return "bounced" if stats.bounced >= stats.bytes else "mixed"


def _identity(key: RequestKey, instance_id: str, incarnation: bytes) -> dict[str, AttributeValue]:
    return {
        REQUEST_ID: str(key.request_id),
        ATTEMPT: key.attempt,
        PEER: instance_id,
        PEER_INCARNATION: incarnation.hex(),
    }
