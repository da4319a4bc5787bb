"""transfer.proto and the envelopes of kv_transfer_service.proto: what two hubs say to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from isthmus.v1 import transfer_pb2, transfer_terms_pb2

from kvtransfer.bounce_ports import BounceChunk, ChunkReady, Grant
from kvtransfer.errors import WireError
from kvtransfer.messages import (
    Bind,
    Cancel,
    Capability,
    ExitReport,
    FenceWriter,
    FirstTokens,
    Goodbye,
    Hello,
    KvIntent,
    KvRequest,
    NotBound,
    PeerBody,
    PeerView,
    Ping,
    Pong,
    ReceiveKey,
    Reconcile,
    ReconcileReply,
    Reject,
    TransferLimits,
    Welcome,
)
from kvtransfer.ports import TransferNotice
from kvtransfer.wire import bounce
from kvtransfer.wire._read import MAX_REASON_SENT, incarnation, limited, present, text
from kvtransfer.wire.binding import (
    bind_from_pb,
    binding_to_pb,
    first_tokens_from_pb,
    kv_intent_from_pb,
    not_bound_from_pb,
)
from kvtransfer.wire.common import (
    incompatibilities_from_pb,
    incompatibilities_to_pb,
    key_from_pb,
    key_to_pb,
)
from kvtransfer.wire.geometry import MAX_DIGEST, instance_info_from_pb, instance_info_to_pb
from kvtransfer.wire.kv_request import kv_request_from_pb, write_kv_request
from kvtransfer.wire.notices import notices_from_pb, notices_to_pb, write_notice
from kvtransfer.wire.page_tables import MAX_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


MAX_ENVELOPE_MESSAGES = 1 << 12
MAX_KEYS = 1 << 16
MAX_FEATURES = 64
MAX_RANKS = 1 << 16


def peer_message_to_pb(body: PeerBody) -> transfer_pb2.PeerMessage:
    """Wraps any body."""
    match body:
        case Hello():
            return transfer_pb2.PeerMessage(hello=_hello_to_pb(body))
        case Welcome():
            return transfer_pb2.PeerMessage(welcome=_welcome_to_pb(body))
        case Reject(incompatibilities):
            reject = transfer_terms_pb2.Reject(incompatibilities=incompatibilities_to_pb(incompatibilities))
            return transfer_pb2.PeerMessage(reject=reject)
        case KvRequest():
            message = transfer_pb2.PeerMessage()
            write_kv_request(body, message.kv_request)
            return message
        case TransferNotice():
            return transfer_pb2.PeerMessage(transfer_notices=notices_to_pb((body,)))
        case Cancel(key, receive):
            return transfer_pb2.PeerMessage(cancel=transfer_pb2.Cancel(key=key_to_pb(key), receive=receive))
        case Reconcile(receives):
            reconcile = transfer_pb2.Reconcile(receives=[_receive_to_pb(one) for one in receives])
            return transfer_pb2.PeerMessage(reconcile=reconcile)
        case ReconcileReply(in_flight, notices):
            reply = transfer_pb2.ReconcileReply(
                in_flight=[_receive_to_pb(one) for one in in_flight], notices=notices_to_pb(notices)
            )
            return transfer_pb2.PeerMessage(reconcile_reply=reply)
        case FenceWriter():
            return transfer_pb2.PeerMessage(fence_writer=fence_to_pb(body))
        case ExitReport(ranks, reason):
            report = transfer_pb2.ExitReport(ranks=ranks, reason=reason[:MAX_REASON_SENT])
            return transfer_pb2.PeerMessage(exit_report=report)
        case Goodbye(reason):
            return transfer_pb2.PeerMessage(goodbye=transfer_pb2.Goodbye(reason=reason[:MAX_REASON_SENT]))
        case KvIntent() | Bind() | NotBound() | FirstTokens():
            return binding_to_pb(body)
        case ChunkReady() | Grant() | BounceChunk():
            return bounce.bounce_to_pb(body)
        case Ping(nonce):
            return transfer_pb2.PeerMessage(ping=transfer_pb2.Ping(nonce=nonce))
        case Pong(nonce):
            return transfer_pb2.PeerMessage(pong=transfer_pb2.Pong(nonce=nonce))


def write_peer_message(body: PeerBody, into: transfer_pb2.PeerMessage) -> None:
    """Any body, into a message of an envelope; what every request says is written in place."""
    match body:
        case KvRequest():
            write_kv_request(body, into.kv_request)
        case TransferNotice():
            write_notice(body, into.transfer_notices)
        case _:
            into.CopyFrom(peer_message_to_pb(body))


def peer_bodies_from_pb(pb: transfer_pb2.PeerMessage) -> tuple[PeerBody, ...]:
    """What one message says: one body, or the notices in it. Raises WireError naming the field; an unknown body is an
    error, never skipped."""
    name = cast("str | None", pb.WhichOneof("body"))
    if name == "transfer_notices":
        return notices_from_pb(pb.transfer_notices)
    if name is None:
        raise WireError("peer_message.body", "missing, or of a kind this build does not know")
    return (_READERS[name](getattr(pb, name)),)


def _capabilities_from_pb(values: Iterable[int], field: str) -> frozenset[Capability]:
    known = {one.value for one in Capability}
    values = tuple(values)
    limited(values, MAX_FEATURES, field)
    if 0 in values:
        raise WireError(field, "unknown value 0")
    # The two sides use what both name, so one that this build does not know can only be dropped.
    return frozenset(Capability(value) for value in values if value in known)


def _capabilities_to_pb(values: frozenset[Capability]) -> list[transfer_terms_pb2.Capability]:
    return [cast("transfer_terms_pb2.Capability", number) for number in sorted(one.value for one in values)]


def _limits_to_pb(limits: TransferLimits) -> transfer_terms_pb2.TransferLimits:
    return transfer_terms_pb2.TransferLimits(
        max_open_requests=limits.max_open_requests, max_block_ids=limits.max_block_ids
    )


def _limits_from_pb(pb: transfer_terms_pb2.TransferLimits, field: str) -> TransferLimits:
    for name in ("max_open_requests", "max_block_ids"):
        if getattr(pb, name) == 0:
            raise WireError(f"{field}.{name}", "0 or missing: nothing could ever be sent")
    return TransferLimits(pb.max_open_requests, pb.max_block_ids)


def peer_view_to_pb(view: PeerView) -> transfer_terms_pb2.PeerTerms:
    """For ListSessions."""
    return transfer_terms_pb2.PeerTerms(
        instance_id=view.instance_id,
        incarnation=view.incarnation,
        protocol_version=view.protocol_version,
        capabilities=_capabilities_to_pb(view.capabilities),
        limits=_limits_to_pb(view.limits),
    )


def peer_view_from_pb(pb: transfer_terms_pb2.PeerTerms) -> PeerView:
    """For readers of ListSessions."""
    return PeerView(
        instance_id=text(pb.instance_id, "peer.instance_id", MAX_NAME),
        incarnation=incarnation(pb.incarnation, "peer"),
        protocol_version=pb.protocol_version,
        capabilities=_capabilities_from_pb(pb.capabilities, "peer.capabilities"),
        limits=_limits_from_pb(pb.limits, "peer.limits"),
    )


def _hello_to_pb(hello: Hello) -> transfer_terms_pb2.Hello:
    return transfer_terms_pb2.Hello(
        protocol_version=hello.protocol_version,
        min_protocol_version=hello.min_protocol_version,
        capabilities=_capabilities_to_pb(hello.capabilities),
        limits=_limits_to_pb(hello.limits),
        required_features=hello.required_features,
        instance=instance_info_to_pb(hello.instance),
        connection_epoch=hello.connection_epoch,
        require_path=hello.require_path,
    )


def _hello_from_pb(pb: transfer_terms_pb2.Hello) -> Hello:
    present(pb, "limits", "hello")
    present(pb, "instance", "hello")
    if not 0 < pb.min_protocol_version <= pb.protocol_version:
        problem = f"{pb.min_protocol_version} is not in [1, protocol_version {pb.protocol_version}]"
        raise WireError("hello.min_protocol_version", problem)
    limited(pb.required_features, MAX_FEATURES, "hello.required_features")
    return Hello(
        protocol_version=pb.protocol_version,
        min_protocol_version=pb.min_protocol_version,
        capabilities=_capabilities_from_pb(pb.capabilities, "hello.capabilities"),
        limits=_limits_from_pb(pb.limits, "hello.limits"),
        required_features=tuple(text(one, "hello.required_features", MAX_NAME) for one in pb.required_features),
        instance=instance_info_from_pb(pb.instance, "hello.instance"),
        connection_epoch=pb.connection_epoch,
        require_path=text(pb.require_path, "hello.require_path", MAX_NAME),
    )


def _welcome_to_pb(welcome: Welcome) -> transfer_terms_pb2.Welcome:
    return transfer_terms_pb2.Welcome(
        protocol_version=welcome.protocol_version,
        capabilities=_capabilities_to_pb(welcome.capabilities),
        limits=_limits_to_pb(welcome.limits),
        instance=instance_info_to_pb(welcome.instance),
        plan_digest=welcome.plan_digest,
        connection_epoch=welcome.connection_epoch,
    )


def _welcome_from_pb(pb: transfer_terms_pb2.Welcome) -> Welcome:
    present(pb, "limits", "welcome")
    present(pb, "instance", "welcome")
    limited(pb.plan_digest, MAX_DIGEST, "welcome.plan_digest")
    if pb.protocol_version == 0:
        raise WireError("welcome.protocol_version", "missing")
    return Welcome(
        protocol_version=pb.protocol_version,
        capabilities=_capabilities_from_pb(pb.capabilities, "welcome.capabilities"),
        limits=_limits_from_pb(pb.limits, "welcome.limits"),
        instance=instance_info_from_pb(pb.instance, "welcome.instance"),
        plan_digest=pb.plan_digest,
        connection_epoch=pb.connection_epoch,
    )


def _reject_from_pb(pb: transfer_terms_pb2.Reject) -> Reject:
    return Reject(incompatibilities_from_pb(pb.incompatibilities, "reject.incompatibilities"))


def _cancel_from_pb(pb: transfer_pb2.Cancel) -> Cancel:
    present(pb, "key", "cancel")
    return Cancel(key_from_pb(pb.key, "cancel.key"), pb.receive)


def _receive_to_pb(receive: ReceiveKey) -> transfer_pb2.ReceiveKey:
    return transfer_pb2.ReceiveKey(key=key_to_pb(receive.key), receive=receive.receive)


def _receives_from_pb(pbs: Sequence[transfer_pb2.ReceiveKey], field: str) -> tuple[ReceiveKey, ...]:
    limited(pbs, MAX_KEYS, field)
    for pb in pbs:
        present(pb, "key", field)
    return tuple(ReceiveKey(key_from_pb(pb.key, field), pb.receive) for pb in pbs)


def _reconcile_from_pb(pb: transfer_pb2.Reconcile) -> Reconcile:
    return Reconcile(_receives_from_pb(pb.receives, "reconcile.receives"))


def _reconcile_reply_from_pb(pb: transfer_pb2.ReconcileReply) -> ReconcileReply:
    return ReconcileReply(
        _receives_from_pb(pb.in_flight, "reconcile_reply.in_flight"),
        notices_from_pb(pb.notices, "reconcile_reply.notices"),
    )


def fence_to_pb(fence: FenceWriter) -> transfer_pb2.FenceWriter:
    """As a message, or inside a FenceRequest."""
    receives = [_receive_to_pb(one) for one in fence.receives]
    return transfer_pb2.FenceWriter(receives=receives, reason=fence.reason[:MAX_REASON_SENT])


def fence_from_pb(pb: transfer_pb2.FenceWriter, field: str = "fence_writer") -> FenceWriter:
    """Raises WireError naming the field."""
    return FenceWriter(_receives_from_pb(pb.receives, f"{field}.receives"), text(pb.reason, f"{field}.reason"))


def _exit_report_from_pb(pb: transfer_pb2.ExitReport) -> ExitReport:
    limited(pb.ranks, MAX_RANKS, "exit_report.ranks")
    return ExitReport(tuple(pb.ranks), text(pb.reason, "exit_report.reason"))


def _goodbye_from_pb(pb: transfer_pb2.Goodbye) -> Goodbye:
    return Goodbye(text(pb.reason, "goodbye.reason"))


def _ping_from_pb(pb: transfer_pb2.Ping) -> Ping:
    return Ping(pb.nonce)


def _pong_from_pb(pb: transfer_pb2.Pong) -> Pong:
    return Pong(pb.nonce)


_READERS = cast(
    "dict[str, Callable[[object], PeerBody]]",
    {
        "hello": _hello_from_pb,
        "welcome": _welcome_from_pb,
        "reject": _reject_from_pb,
        "kv_request": kv_request_from_pb,
        "cancel": _cancel_from_pb,
        "reconcile": _reconcile_from_pb,
        "reconcile_reply": _reconcile_reply_from_pb,
        "fence_writer": fence_from_pb,
        "exit_report": _exit_report_from_pb,
        "goodbye": _goodbye_from_pb,
        "kv_intent": kv_intent_from_pb,
        "bind": bind_from_pb,
        "not_bound": not_bound_from_pb,
        "first_tokens": first_tokens_from_pb,
        **bounce.READERS,
        "ping": _ping_from_pb,
        "pong": _pong_from_pb,
    },
)
