"""kv_transfer_service.proto: envelopes of the Connect stream, and sessions as ListSessions shows them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar, cast

from isthmus.v1 import kv_transfer_service_pb2, transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.messages import Envelope, FenceAnswer, FenceWriter, SessionView
from kvtransfer.ports import TransferNotice
from kvtransfer.rank_info import INCARNATION_BYTES, InstanceRole
from kvtransfer.wire._read import duration, enum, incarnation, limited, parse, present, seconds, text
from kvtransfer.wire.common import key_from_pb, key_to_pb
from kvtransfer.wire.notices import notices_from_pb, notices_to_pb, write_notices
from kvtransfer.wire.page_tables import MAX_NAME
from kvtransfer.wire.peer import fence_from_pb, fence_to_pb, peer_bodies_from_pb, write_peer_message

if TYPE_CHECKING:
    from isthmus.v1 import common_pb2

    from kvtransfer.messages import PeerBody

MAX_ENVELOPE_MESSAGES = 1 << 12
_ANY_SIZE = 1 << 62


AnyEnvelope = kv_transfer_service_pb2.ConnectRequest | kv_transfer_service_pb2.ConnectResponse


def envelope_to_request(envelope: Envelope) -> kv_transfer_service_pb2.ConnectRequest:
    """Generation to context."""
    return _filled(envelope, kv_transfer_service_pb2.ConnectRequest())


def envelope_to_response(envelope: Envelope) -> kv_transfer_service_pb2.ConnectResponse:
    """Context to generation."""
    return _filled(envelope, kv_transfer_service_pb2.ConnectResponse())


def take_messages(queue: deque[PeerBody], into: AnyEnvelope, most: int, nbytes: int) -> int:
    """Moves bodies from the head of a queue into an envelope: at most `most`, at most `nbytes` bytes, but at least one
    message. Notices that follow each other are one message. Returns how many bodies were taken."""
    if len(queue) == 1:
        write_peer_message(queue[0], into.messages.add())
        queue.clear()
        return 1
    taken = size = 0
    while queue and taken < most:
        message = into.messages.add()
        if isinstance(queue[0], TransferNotice):
            count = _run(queue, most - taken)
            write_notices([cast("TransferNotice", queue[at]) for at in range(count)], message.transfer_notices)
        else:
            count = 1
            write_peer_message(queue[0], message)
        # What is alone needs no measuring.
        if taken or count < len(queue):
            size += message.ByteSize()
            if taken and size > nbytes:
                del into.messages[-1]
                break
        for _ in range(count):
            queue.popleft()
        taken += count
    return taken


def _run(queue: deque[PeerBody], most: int) -> int:
    count = 0
    for body in queue:
        if count == most or not isinstance(body, TransferNotice):
            break
        count += 1
    return count


E = TypeVar("E", kv_transfer_service_pb2.ConnectRequest, kv_transfer_service_pb2.ConnectResponse)


def _filled(envelope: Envelope, pb: E) -> E:
    pb.src_incarnation, pb.dst_incarnation = envelope.src_incarnation, envelope.dst_incarnation
    queue = deque(envelope.messages)
    while queue:
        take_messages(queue, pb, len(queue), _ANY_SIZE)
    return pb


def envelope_from_pb(
    pb: AnyEnvelope,
) -> Envelope:
    """Either direction. Raises WireError when any message in it is malformed: then none of them is used."""
    src, dst, messages = pb.src_incarnation, pb.dst_incarnation, pb.messages
    if len(src) != INCARNATION_BYTES:
        raise WireError("envelope.src_incarnation", f"{len(src)} bytes, not {INCARNATION_BYTES}")
    if len(dst) not in (0, INCARNATION_BYTES):
        raise WireError("envelope.dst_incarnation", f"{len(dst)} bytes, not {INCARNATION_BYTES} or 0")
    if len(messages) == 1:
        return Envelope(src, dst, peer_bodies_from_pb(messages[0]))
    limited(messages, MAX_ENVELOPE_MESSAGES, "envelope.messages")
    return Envelope(src, dst, tuple(body for message in messages for body in peer_bodies_from_pb(message)))


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
        notices=notices_to_pb(answer.notices),
    )


def fence_answer_from_pb(pb: kv_transfer_service_pb2.FenceResponse) -> FenceAnswer:
    """Raises WireError naming the field."""
    for values, name in ((pb.exited_incarnations, "exited_incarnations"), (pb.exited_ranks, "exited_ranks")):
        limited(values, MAX_ENVELOPE_MESSAGES, f"fence_response.{name}")
    return FenceAnswer(
        incarnation(pb.incarnation, "fence_response"),
        tuple(incarnation(one, "fence_response.exited") for one in pb.exited_incarnations),
        tuple(pb.exited_ranks),
        notices_from_pb(pb.notices, "fence_response.notices"),
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
