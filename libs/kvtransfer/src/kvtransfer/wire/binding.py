"""Messages of generation_first: between two hubs, and between hub and scheduler role."""

from __future__ import annotations

from typing import cast

from isthmus.v1 import transfer_binding_pb2, transfer_ipc_pb2, transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.messages import Bind, FirstTokens, KvIntent, NotBound
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    BindNews,
    Bound,
    FirstTokensArrived,
    Holder,
    ReceiveIntent,
    SendFirstTokens,
    TransferFailure,
)
from kvtransfer.wire._read import MAX_REASON_SENT, enum, incarnation, limited, present, text
from kvtransfer.wire.common import key_from_pb, key_to_pb, trace_from_pb, trace_to_pb
from kvtransfer.wire.page_tables import MAX_NAME

# First tokens of every answer with their logprobs and draft tokens: a few kilobytes.
MAX_PAYLOAD = 1 << 20

PeerBinding = KvIntent | Bind | NotBound | FirstTokens
SchedulerBinding = ReceiveIntent | BindContext | SendFirstTokens


def binding_to_pb(body: PeerBinding) -> transfer_pb2.PeerMessage:
    """Wraps a body. Raises ValueError for a payload that no peer would take."""
    key = key_to_pb(body.key)
    match body:
        case KvIntent():
            return transfer_pb2.PeerMessage(
                kv_intent=transfer_binding_pb2.KvIntent(key=key, trace=trace_to_pb(body.trace))
            )
        case Bind():
            return transfer_pb2.PeerMessage(bind=transfer_binding_pb2.Bind(key=key, dp_rank=body.dp_rank))
        case NotBound():
            reason = body.reason[:MAX_REASON_SENT]
            return transfer_pb2.PeerMessage(not_bound=transfer_binding_pb2.NotBound(key=key, reason=reason))
        case FirstTokens():
            first = transfer_binding_pb2.FirstTokens(key=key, payload=_checked(body.payload))
            return transfer_pb2.PeerMessage(first_tokens=first)


def kv_intent_from_pb(pb: transfer_binding_pb2.KvIntent) -> KvIntent:
    """Raises WireError naming the field."""
    present(pb, "key", "kv_intent")
    trace = trace_from_pb(pb.trace, "kv_intent.trace") if pb.HasField("trace") else None
    return KvIntent(key_from_pb(pb.key, "kv_intent.key"), trace)


def bind_from_pb(pb: transfer_binding_pb2.Bind) -> Bind:
    """Raises WireError naming the field."""
    present(pb, "key", "bind")
    return Bind(key_from_pb(pb.key, "bind.key"), pb.dp_rank)


def not_bound_from_pb(pb: transfer_binding_pb2.NotBound) -> NotBound:
    """Raises WireError naming the field."""
    present(pb, "key", "not_bound")
    return NotBound(key_from_pb(pb.key, "not_bound.key"), text(pb.reason, "not_bound.reason"))


def first_tokens_from_pb(pb: transfer_binding_pb2.FirstTokens) -> FirstTokens:
    """Raises WireError naming the field."""
    present(pb, "key", "first_tokens")
    limited(pb.payload, MAX_PAYLOAD, "first_tokens.payload")
    return FirstTokens(key_from_pb(pb.key, "first_tokens.key"), pb.payload)


def receive_intent_to_pb(intent: ReceiveIntent) -> transfer_ipc_pb2.ReceiveIntent:
    """Scheduler to hub."""
    return transfer_ipc_pb2.ReceiveIntent(
        key=key_to_pb(intent.key),
        endpoint=intent.holder.endpoint,
        instance_id=intent.holder.instance_id,
        incarnation=intent.holder.incarnation,
        trace=trace_to_pb(intent.trace),
    )


def receive_intent_from_pb(pb: transfer_ipc_pb2.ReceiveIntent) -> ReceiveIntent:
    """Raises WireError naming the field."""
    field = "receive_intent"
    present(pb, "key", field)
    holder = Holder(
        text(pb.endpoint, f"{field}.endpoint", MAX_NAME),
        text(pb.instance_id, f"{field}.instance_id", MAX_NAME),
        incarnation(pb.incarnation, field),
    )
    trace = trace_from_pb(pb.trace, f"{field}.trace") if pb.HasField("trace") else None
    return ReceiveIntent(key_from_pb(pb.key, f"{field}.key"), holder, trace)


def bind_context_to_pb(bind: BindContext) -> transfer_ipc_pb2.BindContext:
    """Scheduler to hub."""
    return transfer_ipc_pb2.BindContext(key=key_to_pb(bind.key), dp_rank=bind.dp_rank)


def bind_context_from_pb(pb: transfer_ipc_pb2.BindContext) -> BindContext:
    """Raises WireError naming the field."""
    present(pb, "key", "bind_context")
    return BindContext(key_from_pb(pb.key, "bind_context.key"), pb.dp_rank)


def send_first_tokens_to_pb(first: SendFirstTokens) -> transfer_ipc_pb2.SendFirstTokens:
    """Scheduler to hub. Raises ValueError for a payload that no peer would take."""
    return transfer_ipc_pb2.SendFirstTokens(key=key_to_pb(first.key), payload=_checked(first.payload))


def send_first_tokens_from_pb(pb: transfer_ipc_pb2.SendFirstTokens) -> SendFirstTokens:
    """Raises WireError naming the field."""
    present(pb, "key", "send_first_tokens")
    limited(pb.payload, MAX_PAYLOAD, "send_first_tokens.payload")
    return SendFirstTokens(key_from_pb(pb.key, "send_first_tokens.key"), pb.payload)


def bind_news_to_pb(news: BindNews) -> transfer_ipc_pb2.BindNews:
    """Hub to scheduler."""
    key = key_to_pb(news.key)
    match news:
        case Bound(_, dp_rank):
            return transfer_ipc_pb2.BindNews(key=key, bound=dp_rank)
        case FirstTokensArrived(_, payload):
            return transfer_ipc_pb2.BindNews(key=key, first_tokens=payload)
        case BindFailed(_, failure, reason):
            name = transfer_ipc_pb2.TransferFailure.Name(failure.value)
            failed = transfer_ipc_pb2.BindFailure(failure=name, reason=reason[:MAX_REASON_SENT])
            return transfer_ipc_pb2.BindNews(key=key, failed=failed)


def bind_news_from_pb(pb: transfer_ipc_pb2.BindNews) -> BindNews:
    """Raises WireError naming the field."""
    present(pb, "key", "bind_news")
    key = key_from_pb(pb.key, "bind_news.key")
    match cast("str | None", pb.WhichOneof("news")):
        case "bound":
            return Bound(key, pb.bound)
        case "first_tokens":
            return FirstTokensArrived(key, pb.first_tokens)
        case "failed":
            failure = enum(TransferFailure, pb.failed.failure, "bind_news.failed.failure")
            return BindFailed(key, failure, text(pb.failed.reason, "bind_news.failed.reason"))
        case _:
            raise WireError("bind_news.news", "missing, or of a kind this build does not know")


def _checked(payload: bytes) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"first tokens of {len(payload)} bytes, at most {MAX_PAYLOAD} can be sent")
    return payload
