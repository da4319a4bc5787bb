"""What a scheduler and its hub say to each other, as arms of the envelope that carries it.

Two kinds of envelope do: those of an engine that starts its own processes (transfer_local.proto), and those of the
engine process of a worker (engine_ipc.proto), which have more arms beside these. Both name these arms alike.
"""

from __future__ import annotations

from typing import Any, Protocol

from isthmus.v1 import transfer_ipc_pb2

from kvtransfer.ports import (
    BindContext,
    CancelTransfer,
    HubToScheduler,
    ReceiveIntent,
    ReceiveOutcome,
    ReceiveRequest,
    SchedulerToHub,
    SendFirstTokens,
    SendOffer,
    SendOutcome,
)
from kvtransfer.wire.binding import (
    bind_context_from_pb,
    bind_context_to_pb,
    bind_news_from_pb,
    bind_news_to_pb,
    receive_intent_from_pb,
    receive_intent_to_pb,
    send_first_tokens_from_pb,
    send_first_tokens_to_pb,
)
from kvtransfer.wire.scheduler import (
    cancel_transfer_from_pb,
    cancel_transfer_to_pb,
    receive_outcome_from_pb,
    receive_outcome_to_pb,
    receive_request_from_pb,
    receive_request_to_pb,
    send_offer_from_pb,
    send_offer_to_pb,
    send_outcome_from_pb,
    send_outcome_to_pb,
)


class EventArms(Protocol):
    """An envelope from a scheduler to its hub."""

    @property
    def send_offer(self) -> transfer_ipc_pb2.SendOffer: ...
    @property
    def receive_request(self) -> transfer_ipc_pb2.ReceiveRequest: ...
    @property
    def cancel_transfer(self) -> transfer_ipc_pb2.CancelTransfer: ...
    @property
    def bind_context(self) -> transfer_ipc_pb2.BindContext: ...
    @property
    def send_first_tokens(self) -> transfer_ipc_pb2.SendFirstTokens: ...
    @property
    def receive_intent(self) -> transfer_ipc_pb2.ReceiveIntent: ...


class CommandArms(Protocol):
    """An envelope from a hub to its scheduler."""

    @property
    def send_outcome(self) -> transfer_ipc_pb2.SendOutcome: ...
    @property
    def receive_outcome(self) -> transfer_ipc_pb2.ReceiveOutcome: ...
    @property
    def bind_news(self) -> transfer_ipc_pb2.BindNews: ...


def event_arm(event: SchedulerToHub) -> dict[str, Any]:
    """The one keyword that the envelope is made with: name of the arm -> its message."""
    match event:
        case SendOffer():
            return {"send_offer": send_offer_to_pb(event)}
        case ReceiveRequest():
            return {"receive_request": receive_request_to_pb(event)}
        case CancelTransfer():
            return {"cancel_transfer": cancel_transfer_to_pb(event)}
        case BindContext():
            return {"bind_context": bind_context_to_pb(event)}
        case SendFirstTokens():
            return {"send_first_tokens": send_first_tokens_to_pb(event)}
        case ReceiveIntent():
            return {"receive_intent": receive_intent_to_pb(event)}


def event_from_arm(arm: str | None, pb: EventArms) -> SchedulerToHub | None:
    """What the set arm says; None when it is none of these. Raises WireError naming the field."""
    match arm:
        case "send_offer":
            return send_offer_from_pb(pb.send_offer)
        case "receive_request":
            return receive_request_from_pb(pb.receive_request)
        case "cancel_transfer":
            return cancel_transfer_from_pb(pb.cancel_transfer)
        case "bind_context":
            return bind_context_from_pb(pb.bind_context)
        case "send_first_tokens":
            return send_first_tokens_from_pb(pb.send_first_tokens)
        case "receive_intent":
            return receive_intent_from_pb(pb.receive_intent)
        case _:
            return None


def command_arm(message: HubToScheduler) -> dict[str, Any]:
    """The one keyword that the envelope is made with: name of the arm -> its message."""
    match message:
        case SendOutcome():
            return {"send_outcome": send_outcome_to_pb(message)}
        case ReceiveOutcome():
            return {"receive_outcome": receive_outcome_to_pb(message)}
        case _:
            return {"bind_news": bind_news_to_pb(message)}


def command_from_arm(arm: str | None, pb: CommandArms) -> HubToScheduler | None:
    """What the set arm says; None when it is none of these. Raises WireError naming the field."""
    match arm:
        case "send_outcome":
            return send_outcome_from_pb(pb.send_outcome)
        case "receive_outcome":
            return receive_outcome_from_pb(pb.receive_outcome)
        case "bind_news":
            return bind_news_from_pb(pb.bind_news)
        case _:
            return None
