"""What the machines want done. Frozen values; a driver carries them out in order, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.messages import PeerBody
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


Action = ToScheduler | ToRank | ToPeer
Emit = Callable[[Action], None]
