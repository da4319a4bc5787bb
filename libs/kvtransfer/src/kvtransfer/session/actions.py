"""What the machines want done. Frozen values; a driver carries them out in order, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.messages import PeerBody, ReceiveKey
    from kvtransfer.ports import HubToRank, HubToScheduler

# (instance id, incarnation)
PeerId = tuple[str, bytes]


class EndReason(Enum):
    """Why a machine ends a stream."""

    # Both sides know that the pair can not work; a Reject has been said.
    REJECTED = "rejected"
    # The peer broke the protocol.
    PROTOCOL = "protocol"
    # Another stream of the same peer took over.
    REPLACED = "replaced"
    # Probes were not answered.
    SILENT = "silent"
    # This side can not serve it now; try again.
    UNAVAILABLE = "unavailable"
    # Nobody needs it any more.
    UNNEEDED = "unneeded"


@dataclass(frozen=True, slots=True)
class ToScheduler:
    """Deliver an outcome to the scheduler role."""

    message: HubToScheduler


@dataclass(frozen=True, slots=True)
class ToRank:
    """Hand a command to a rank role."""

    rank: int
    message: HubToRank


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Queue a message on the stream with a peer; without a ready stream it is dropped, Reconcile makes up for it."""

    peer: PeerId
    message: PeerBody


@dataclass(frozen=True, slots=True)
class Fence:
    """Ask the hub behind `endpoint` to make sure that what `receives` expose is written no more: on the stream when it
    is ready, otherwise by a call of its own."""

    peer: PeerId
    endpoint: str
    receives: tuple[ReceiveKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class KillRank:
    """SIGKILL a rank of this instance; its parent then reports the exit."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class StopInstance:
    """This instance can not go on: it must end its processes and say why."""

    reason: str


Action = ToScheduler | ToRank | ToPeer | Fence | KillRank | StopInstance
Emit = Callable[[Action], None]
