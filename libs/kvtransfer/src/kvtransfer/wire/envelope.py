"""kv_transfer_service.proto: envelopes of the Connect stream, and sessions as ListSessions shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from isthmus.v1 import kv_transfer_service_pb2, transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.messages import Envelope, SessionView
from kvtransfer.rank_info import INCARNATION_BYTES, InstanceRole
from kvtransfer.wire._read import duration, enum, limited, parse, present, seconds, text
from kvtransfer.wire.common import key_from_pb, key_to_pb
from kvtransfer.wire.geometry import MAX_NAME
from kvtransfer.wire.peer import peer_message_from_pb, peer_message_to_pb

if TYPE_CHECKING:
    from isthmus.v1 import common_pb2

MAX_ENVELOPE_MESSAGES = 1 << 12


def envelope_to_request(envelope: Envelope) -> kv_transfer_service_pb2.ConnectRequest:
    """Generation to context."""
    return kv_transfer_service_pb2.ConnectRequest(
        src_incarnation=envelope.src_incarnation,
        dst_incarnation=envelope.dst_incarnation,
        messages=[peer_message_to_pb(body) for body in envelope.messages],
    )


def envelope_to_response(envelope: Envelope) -> kv_transfer_service_pb2.ConnectResponse:
    """Context to generation."""
    return kv_transfer_service_pb2.ConnectResponse(
        src_incarnation=envelope.src_incarnation,
        dst_incarnation=envelope.dst_incarnation,
        messages=[peer_message_to_pb(body) for body in envelope.messages],
    )


def envelope_from_pb(
    pb: kv_transfer_service_pb2.ConnectRequest | kv_transfer_service_pb2.ConnectResponse,
) -> Envelope:
    """Either direction. Raises WireError when any message in it is malformed: then none of them is used."""
    limited(pb.messages, MAX_ENVELOPE_MESSAGES, "envelope.messages")
    if len(pb.src_incarnation) != INCARNATION_BYTES:
        raise WireError("envelope.src_incarnation", f"{len(pb.src_incarnation)} bytes, not {INCARNATION_BYTES}")
    if len(pb.dst_incarnation) not in (0, INCARNATION_BYTES):
        raise WireError("envelope.dst_incarnation", f"{len(pb.dst_incarnation)} bytes, not {INCARNATION_BYTES} or 0")
    messages = tuple(peer_message_from_pb(message) for message in pb.messages)
    return Envelope(pb.src_incarnation, pb.dst_incarnation, messages)


def envelope_from_request_bytes(data: bytes) -> Envelope:
    """A serialised ConnectRequest. Raises WireError."""
    return envelope_from_pb(parse(kv_transfer_service_pb2.ConnectRequest, data, "envelope"))


def session_view_to_pb(view: SessionView) -> transfer_pb2.SessionInfo:
    """For ListSessions."""
    pb = transfer_pb2.SessionInfo(
        key=key_to_pb(view.key),
        state=view.state,
        peer_instance_id=view.peer_instance_id,
        age=duration(view.age),
        pages=view.pages,
        in_doubt=view.in_doubt,
    )
    pb.side = cast("common_pb2.InstanceRole", view.side.value)
    return pb


def session_view_from_pb(pb: transfer_pb2.SessionInfo) -> SessionView:
    """For readers of ListSessions."""
    present(pb, "key", "session")
    return SessionView(
        key=key_from_pb(pb.key, "session.key"),
        side=enum(InstanceRole, pb.side, "session.side"),
        state=text(pb.state, "session.state", MAX_NAME),
        peer_instance_id=text(pb.peer_instance_id, "session.peer_instance_id", MAX_NAME),
        age=seconds(pb.age, "session.age"),
        pages=pb.pages,
        in_doubt=pb.in_doubt,
    )
