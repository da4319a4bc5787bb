"""What the rank role remembers of peers, of orders that wait, and of writes that have begun."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import TransferStats, WriteOrder
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.transceiver.bounced_write import BouncedWrite
    from kvtransfer.transceiver.choosing import Chosen
    from kvtransfer.transceiver.layered_write import LayeredWrite
    from kvtransfer.transceiver.pieced_write import PiecedWrite

PeerId = tuple[str, bytes]


@dataclass(slots=True, eq=False)
class Peer:
    """A peer instance that is loaded."""

    info: InstanceInfo
    plans: dict[int, PeerPlan]
    bounce: bool = False
    # Its own requirement on the way.
    require_path: str = ""
    # The agent said that the connection broke: the next LoadPeer makes it again.
    lost: bool = False
    # ForgetPeer came while a write was open.
    forgotten: bool = False


@dataclass(slots=True, eq=False)
class Queued:
    """An order for one destination rank that nothing has been done about. `taken`: when it came."""

    order: WriteOrder
    dst_rank: int
    taken: float


@dataclass(slots=True, eq=False)
class Open:
    """A write that has begun."""

    order: WriteOrder
    peer: Peer
    plan: PeerPlan
    chosen: Chosen
    stats: TransferStats
    posted: float
    # It has had the agent for itself: what it takes says something about the path.
    alone: bool

    @property
    def write(self) -> PiecedWrite | BouncedWrite | LayeredWrite:
        """What posts it."""
        return self.chosen.write
