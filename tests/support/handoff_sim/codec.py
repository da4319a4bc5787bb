"""A share of the schedules sends everything through its protobuf form, as between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer import ports, wire
from kvtransfer.messages import Envelope

if TYPE_CHECKING:
    from collections.abc import Callable


def _envelope(item: Envelope) -> Envelope:
    return wire.envelope_from_request_bytes(wire.envelope_to_request(item).SerializeToString())


def _scheduler(to_pb: Callable[..., object], from_pb: Callable[..., object]) -> Callable[..., object]:
    def convert(item: object) -> object:
        pb = to_pb(item)
        return from_pb(type(pb).FromString(pb.SerializeToString()))  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]

    return convert


_CONVERT: dict[type, Callable[..., object]] = {
    Envelope: _envelope,
    ports.SendOffer: _scheduler(wire.send_offer_to_pb, wire.send_offer_from_pb),
    ports.ReceiveRequest: _scheduler(wire.receive_request_to_pb, wire.receive_request_from_pb),
    ports.ReceiveIntent: _scheduler(wire.receive_intent_to_pb, wire.receive_intent_from_pb),
    ports.BindContext: _scheduler(wire.bind_context_to_pb, wire.bind_context_from_pb),
    ports.SendFirstTokens: _scheduler(wire.send_first_tokens_to_pb, wire.send_first_tokens_from_pb),
    ports.Bound: _scheduler(wire.bind_news_to_pb, wire.bind_news_from_pb),
    ports.FirstTokensArrived: _scheduler(wire.bind_news_to_pb, wire.bind_news_from_pb),
    ports.BindFailed: _scheduler(wire.bind_news_to_pb, wire.bind_news_from_pb),
    ports.CancelTransfer: _scheduler(wire.cancel_transfer_to_pb, wire.cancel_transfer_from_pb),
    ports.SendOutcome: _scheduler(wire.send_outcome_to_pb, wire.send_outcome_from_pb),
    ports.ReceiveOutcome: _scheduler(wire.receive_outcome_to_pb, wire.receive_outcome_from_pb),
}
_COMMANDS = (
    ports.LoadPeer,
    ports.ForgetPeer,
    ports.WriteOrder,
    ports.CancelWrite,
    ports.Grant,
    ports.MeetSource,
    ports.PrepareScatter,
    ports.ScatterOrder,
)


def through_wire(item: object) -> object:
    """The item as the other process reads it."""
    convert = _CONVERT.get(type(item))
    if convert is not None:
        return convert(item)
    if isinstance(item, _COMMANDS):
        return wire.rank_input_from_bytes(wire.rank_input_to_bytes([item]))[0]
    return wire.rank_output_from_bytes(wire.rank_output_to_bytes([item]))[0]  # pyright: ignore[reportArgumentType]
