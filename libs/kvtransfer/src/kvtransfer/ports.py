"""What the roles of the transceiver and the hub say to each other: frozen values, no I/O.

    scheduler role ──SendOffer, ReceiveRequest, CancelTransfer──▶ hub ──LoadPeer, WriteOrder, CancelWrite──▶ rank role
    scheduler role ◀────────SendOutcome, ReceiveOutcome────────── hub ◀──────PeerLoaded, TransferNotice────── rank role

The protobuf twins live in `transfer_ipc.proto` and `transfer.proto`; `kvtransfer.wire` converts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from isthmus_core.keys import RequestKey as RequestKey
from isthmus_core.tracing import TraceContext as TraceContext

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtransfer.rank_info import InstanceInfo, RankInfo


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token positions [begin, end) of a prompt."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """Blocks of one layer group on one rank, int32, in token order. -1 entries name no block."""

    rank: int
    layer_group: int
    blocks: NDArray[np.int32]


class TransferFailure(Enum):
    """Why a hand-off did not happen; `NONE` when it did. Values are those of `isthmus.v1.TransferFailure`."""

    NONE = 0
    CANCELLED = 1
    EXPIRED = 2
    NOT_HELD = 3
    PEER_UNKNOWN = 4
    PEER_LOST = 5
    WRITE_FAILED = 6
    TIMED_OUT = 7


class WriterOutcome(Enum):
    """How a writer is done with an attempt. Values are those of `isthmus.v1.WriterOutcome`."""

    DELIVERED = 1
    NEVER_STARTED = 2
    QUIESCED = 3


# --- scheduler role -> hub


@dataclass(frozen=True, slots=True)
class SendOffer:
    """A context leg offers pages. They stay pinned until its `SendOutcome`. `sources` lists blocks from token 0."""

    key: RequestKey
    tokens: TokenRange
    sources: tuple[RankBlocks, ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """The context instance that holds the pages of an attempt."""

    endpoint: str
    instance_id: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """A generation leg exposes pages (blocks from `tokens.begin`) and asks `holder` for its cache.

    The caller guarantees that every kernel that used the pages before has finished.
    """

    key: RequestKey
    tokens: TokenRange
    destinations: tuple[RankBlocks, ...]
    holder: Holder
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Withdraws an offer or a receive. Its outcome still comes, when no write can touch the pages."""

    key: RequestKey


# --- hub -> scheduler role


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one writer's work cost. Durations in seconds."""

    bytes: int = 0
    descriptors: int = 0
    path: str = ""
    queue: float = 0.0
    plan: float = 0.0
    post: float = 0.0
    wire: float = 0.0


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """`TransferStats` over all writers of an attempt (sums of bytes and descriptors, maxima of times) plus the
    receiver's own `total`: from KvRequest to complete manifest, in seconds."""

    writers: TransferStats
    total: float


@dataclass(frozen=True, slots=True)
class SendOutcome:
    """Every write from the pages of an offer is over; they may be freed."""

    key: RequestKey
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReceiveOutcome:
    """The cache has arrived (`failure` NONE, always settled) or will not arrive.

    A failure may come twice: first with `settled` False (tell the client, keep the pages), then True (free the pages).
    """

    key: RequestKey
    settled: bool
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""
    stats: HandoffStats | None = None


# --- hub -> rank role


@dataclass(frozen=True, slots=True)
class LoadPeer:
    """Load the agents of a peer instance, build the plans, warm the connections. Answered by `PeerLoaded`."""

    peer: InstanceInfo


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """Drop a peer's agents and plans. Only sent when no write to it is open."""

    instance_id: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """Write one attempt's tokens to one peer. Answered by one `TransferNotice` for each destination rank it names.

    `sources` lists this rank's blocks from token 0; `destinations` the peer's blocks from `tokens.begin`.
    """

    key: RequestKey
    instance_id: str
    incarnation: bytes
    tokens: TokenRange
    sources: tuple[RankBlocks, ...]
    destinations: tuple[RankBlocks, ...]


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """Do not start what has not been posted. The notices of the order still come."""

    key: RequestKey


# --- rank role -> hub


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """One reason why two sides can not work together: the field, both values, what to do."""

    field: str
    mine: str
    yours: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}: mine {self.mine}, yours {self.yours}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class RankReady:
    """First event of a rank: what its peers must know about it."""

    info: RankInfo


@dataclass(frozen=True, slots=True)
class PeerLoaded:
    """Answer to `LoadPeer`. Empty `incompatibilities`: the pair works."""

    instance_id: str
    incarnation: bytes
    incompatibilities: tuple[Incompatibility, ...] = ()
    plan_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Extent:
    """A rectangle of tokens x global layers of one view of one layer group, on the destination."""

    layer_group: int
    view: int
    tokens: TokenRange
    layer_begin: int
    layer_end: int


@dataclass(frozen=True, slots=True)
class TransferNotice:
    """One writer is done with one attempt and never touches the destination again.

    `not_held`: nothing was written because the context side does not hold the pages (never offered, expired,
    withdrawn); only with NEVER_STARTED.
    """

    key: RequestKey
    src_rank: int
    dst_rank: int
    outcome: WriterOutcome
    extents: tuple[Extent, ...] = ()
    reason: str = ""
    stats: TransferStats = field(default_factory=TransferStats)
    not_held: bool = False


SchedulerToHub = SendOffer | ReceiveRequest | CancelTransfer
HubToScheduler = SendOutcome | ReceiveOutcome
HubToRank = LoadPeer | ForgetPeer | WriteOrder | CancelWrite
RankToHub = RankReady | PeerLoaded | TransferNotice


class SchedulerPort(Protocol):
    """The scheduler role's way to the hub. Injected; the role never knows whether it is a socket or a call."""

    def send(self, message: SchedulerToHub) -> None:
        """Hand a message to the hub, in order, without waiting. Raises ConnectionError when the hub is gone."""
        ...


class RankPort(Protocol):
    """The hub's way to one rank role."""

    def send(self, message: HubToRank) -> None:
        """Hand a message to the rank, in order, without waiting. Raises ConnectionError when the rank is gone."""
        ...
