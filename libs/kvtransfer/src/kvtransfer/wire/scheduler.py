"""transfer_ipc.proto, first part: hub and scheduler role."""

from __future__ import annotations

from isthmus.v1 import generation_pb2, transfer_ipc_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import (
    CancelTransfer,
    HandoffStats,
    Holder,
    ReceiveOutcome,
    ReceiveRequest,
    SendOffer,
    SendOutcome,
    TransferFailure,
    TransferStats,
)
from kvtransfer.wire._read import MAX_REASON_SENT, duration, enum, incarnation, present, seconds, text
from kvtransfer.wire.block_lists import block_lists_from_pb, block_lists_to_pb
from kvtransfer.wire.common import (
    key_from_pb,
    key_to_pb,
    tokens_from_pb,
    tokens_to_pb,
    trace_from_pb,
    trace_to_pb,
)
from kvtransfer.wire.page_tables import MAX_NAME


def send_offer_to_pb(offer: SendOffer) -> transfer_ipc_pb2.SendOffer:
    """Scheduler to hub."""
    return transfer_ipc_pb2.SendOffer(
        key=key_to_pb(offer.key),
        tokens=tokens_to_pb(offer.tokens),
        sources=block_lists_to_pb(offer.sources),
        chunk=offer.chunk,
        more=offer.more,
        dp_rank=offer.dp_rank,
        step=offer.step,
    )


def send_offer_from_pb(pb: transfer_ipc_pb2.SendOffer) -> SendOffer:
    """Raises WireError naming the field."""
    present(pb, "key", "send_offer")
    present(pb, "tokens", "send_offer")
    return SendOffer(
        key_from_pb(pb.key, "send_offer.key"),
        tokens_from_pb(pb.tokens, "send_offer.tokens"),
        block_lists_from_pb(pb.sources, "send_offer.sources"),
        pb.chunk,
        pb.more,
        pb.dp_rank,
        pb.step,
    )


def receive_request_to_pb(request: ReceiveRequest) -> transfer_ipc_pb2.ReceiveRequest:
    """Scheduler to hub."""
    return transfer_ipc_pb2.ReceiveRequest(
        key=key_to_pb(request.key),
        tokens=tokens_to_pb(request.tokens),
        destinations=block_lists_to_pb(request.destinations),
        endpoint=request.holder.endpoint,
        instance_id=request.holder.instance_id,
        incarnation=request.holder.incarnation,
        trace=trace_to_pb(request.trace),
        may_retry=request.may_retry,
        context_dp_rank=request.holder.dp_rank,
        dp_rank=request.dp_rank,
        timeout=duration(request.timeout_s) if request.timeout_s else None,
    )


def receive_request_from_pb(pb: transfer_ipc_pb2.ReceiveRequest) -> ReceiveRequest:
    """Raises WireError naming the field."""
    field = "receive_request"
    present(pb, "key", field)
    present(pb, "tokens", field)
    return ReceiveRequest(
        key=key_from_pb(pb.key, f"{field}.key"),
        tokens=tokens_from_pb(pb.tokens, f"{field}.tokens"),
        destinations=block_lists_from_pb(pb.destinations, f"{field}.destinations"),
        holder=Holder(
            text(pb.endpoint, f"{field}.endpoint", MAX_NAME),
            text(pb.instance_id, f"{field}.instance_id", MAX_NAME),
            incarnation(pb.incarnation, field),
            pb.context_dp_rank,
        ),
        trace=trace_from_pb(pb.trace, f"{field}.trace") if pb.HasField("trace") else None,
        may_retry=pb.may_retry,
        dp_rank=pb.dp_rank,
        timeout_s=seconds(pb.timeout, f"{field}.timeout"),
    )


def cancel_transfer_to_pb(cancel: CancelTransfer) -> transfer_ipc_pb2.CancelTransfer:
    """Scheduler to hub."""
    return transfer_ipc_pb2.CancelTransfer(key=key_to_pb(cancel.key))


def cancel_transfer_from_pb(pb: transfer_ipc_pb2.CancelTransfer) -> CancelTransfer:
    """Raises WireError naming the field."""
    present(pb, "key", "cancel_transfer")
    return CancelTransfer(key_from_pb(pb.key, "cancel_transfer.key"))


def send_outcome_to_pb(outcome: SendOutcome) -> transfer_ipc_pb2.SendOutcome:
    """Hub to scheduler."""
    return transfer_ipc_pb2.SendOutcome(
        key=key_to_pb(outcome.key),
        failure=transfer_ipc_pb2.TransferFailure.Name(outcome.failure.value),
        reason=outcome.reason[:MAX_REASON_SENT],
    )


def send_outcome_from_pb(pb: transfer_ipc_pb2.SendOutcome) -> SendOutcome:
    """Raises WireError naming the field."""
    present(pb, "key", "send_outcome")
    return SendOutcome(
        key_from_pb(pb.key, "send_outcome.key"),
        enum(TransferFailure, pb.failure, "send_outcome.failure"),
        text(pb.reason, "send_outcome.reason"),
    )


def receive_outcome_to_pb(outcome: ReceiveOutcome) -> transfer_ipc_pb2.ReceiveOutcome:
    """Hub to scheduler."""
    return transfer_ipc_pb2.ReceiveOutcome(
        key=key_to_pb(outcome.key),
        failure=transfer_ipc_pb2.TransferFailure.Name(outcome.failure.value),
        reason=outcome.reason[:MAX_REASON_SENT],
        report=None if outcome.stats is None else handoff_report_to_pb(outcome.stats),
        settled=outcome.settled,
        may_retry=outcome.may_retry,
    )


def receive_outcome_from_pb(pb: transfer_ipc_pb2.ReceiveOutcome) -> ReceiveOutcome:
    """Raises WireError naming the field; an unsettled success can not exist."""
    present(pb, "key", "receive_outcome")
    failure = enum(TransferFailure, pb.failure, "receive_outcome.failure")
    if failure is TransferFailure.NONE and not pb.settled:
        raise WireError("receive_outcome.settled", "false although the cache has arrived")
    return ReceiveOutcome(
        key=key_from_pb(pb.key, "receive_outcome.key"),
        settled=pb.settled,
        failure=failure,
        reason=text(pb.reason, "receive_outcome.reason"),
        stats=handoff_report_from_pb(pb.report, "receive_outcome.report") if pb.HasField("report") else None,
        may_retry=pb.may_retry,
    )


def handoff_report_to_pb(stats: HandoffStats) -> generation_pb2.HandoffReport:
    """What the client is told about a hand-off."""
    writers = stats.writers
    return generation_pb2.HandoffReport(
        bytes=writers.bytes,
        descriptors=writers.descriptors,
        path=writers.path,
        total=duration(stats.total),
        queue=duration(writers.queue),
        plan=duration(writers.plan),
        post=duration(writers.post),
        wire=duration(writers.wire),
    )


def handoff_report_from_pb(pb: generation_pb2.HandoffReport, field: str = "handoff_report") -> HandoffStats:
    """Raises WireError for negative durations."""
    writers = TransferStats(
        bytes=pb.bytes,
        descriptors=pb.descriptors,
        path=text(pb.path, f"{field}.path"),
        queue=seconds(pb.queue, f"{field}.queue"),
        plan=seconds(pb.plan, f"{field}.plan"),
        post=seconds(pb.post, f"{field}.post"),
        wire=seconds(pb.wire, f"{field}.wire"),
    )
    return HandoffStats(writers, seconds(pb.total, f"{field}.total"))
