"""kv_transfer_service.proto: envelopes of the Connect stream, and sessions as ListSessions shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from isthmus.v1 import kv_transfer_service_pb2, transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.messages import Envelope, FenceAnswer, FenceWriter, SessionView
from kvtransfer.rank_info import INCARNATION_BYTES, InstanceRole
from kvtransfer.wire._read import duration, enum, incarnation, limited, parse, present, seconds, text
from kvtransfer.wire.common import key_from_pb, key_to_pb, notice_from_pb, notice_to_pb
from kvtransfer.wire.page_tables import MAX_NAME
from kvtransfer.wire.peer import MAX_KEYS, fence_from_pb, fence_to_pb, peer_message_from_pb, peer_message_to_pb

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


def fence_request_to_pb(
    incarnation: bytes, asker: tuple[str, bytes], fence: FenceWriter
) -> kv_transfer_service_pb2.FenceRequest:
    """To the hub behind the endpoint of the writers of `incarnation`."""
    return kv_transfer_service_pb2.FenceRequest(
        incarnation=incarnation, instance_id=asker[0], instance_incarnation=asker[1], fence=fence_to_pb(fence)
    )


def fence_request_from_pb(
    pb: kv_transfer_service_pb2.FenceRequest,
) -> tuple[bytes, tuple[str, bytes], FenceWriter]:
    """Incarnation of the writers, who asks, for what. Raises WireError naming the field."""
    present(pb, "fence", "fence_request")
    instance_id = text(pb.instance_id, "fence_request.instance_id", MAX_NAME)
    asker = (instance_id, incarnation(pb.instance_incarnation, "fence_request.instance"))
    return incarnation(pb.incarnation, "fence_request"), asker, fence_from_pb(pb.fence, "fence_request.fence")


def fence_answer_to_pb(answer: FenceAnswer) -> kv_transfer_service_pb2.FenceResponse:
    """What the hub can prove."""
    return kv_transfer_service_pb2.FenceResponse(
        incarnation=answer.incarnation,
        exited_incarnations=answer.exited_incarnations,
        exited_ranks=answer.exited_ranks,
        notices=[notice_to_pb(one) for one in answer.notices],
    )


def fence_answer_from_pb(pb: kv_transfer_service_pb2.FenceResponse) -> FenceAnswer:
    """Raises WireError naming the field."""
    for values, name in ((pb.exited_incarnations, "exited_incarnations"), (pb.exited_ranks, "exited_ranks")):
        limited(values, MAX_ENVELOPE_MESSAGES, f"fence_response.{name}")
    limited(pb.notices, MAX_KEYS, "fence_response.notices")
    return FenceAnswer(
        incarnation(pb.incarnation, "fence_response"),
        tuple(incarnation(one, "fence_response.exited") for one in pb.exited_incarnations),
        tuple(pb.exited_ranks),
        tuple(notice_from_pb(one, "fence_response.notices") for one in pb.notices),
    )


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
