"""What the roles of the transceiver and the hub say to each other: frozen values, no I/O.

    scheduler role ──SendOffer, ReceiveRequest, CancelTransfer──▶ hub ──LoadPeer, WriteOrder, CancelWrite──▶ rank role
    scheduler role ◀────────SendOutcome, ReceiveOutcome────────── hub ◀──────PeerLoaded, TransferNotice────── rank role

The protobuf twins live in `transfer_ipc.proto` and `transfer.proto`; `kvtransfer.wire` converts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from isthmus_core.keys import RequestKey as RequestKey
from isthmus_core.tracing import TraceContext as TraceContext
from kvtransfer.binding_ports import BindContext as BindContext
from kvtransfer.binding_ports import BindFailed as BindFailed
from kvtransfer.binding_ports import BindNews as BindNews
from kvtransfer.binding_ports import Bound as Bound
from kvtransfer.binding_ports import FirstTokensArrived as FirstTokensArrived
from kvtransfer.binding_ports import ReceiveIntent as ReceiveIntent
from kvtransfer.binding_ports import SendFirstTokens as SendFirstTokens
from kvtransfer.bounce_ports import Grant as Grant
from kvtransfer.bounce_ports import MeetSource as MeetSource
from kvtransfer.bounce_ports import PeerWord as PeerWord
from kvtransfer.bounce_ports import PrepareScatter as PrepareScatter
from kvtransfer.bounce_ports import Scattered as Scattered
from kvtransfer.bounce_ports import ScatterOrder as ScatterOrder
from kvtransfer.probe_ports import PairProbe as PairProbe
from kvtransfer.probe_ports import PeerProbed as PeerProbed
from kvtransfer.probe_ports import ProbePeer as ProbePeer

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


class RankBlocks(NamedTuple):
    """Blocks of one layer group on one rank, int32, in token order. -1 entries name no block.

    `begin`: first token wanted (destination) or held (source); blocks[0] holds it, or the first token after it that the
    rank has. Recurrent groups list one slot.
    """

    rank: int
    layer_group: int
    blocks: NDArray[np.int32]
    begin: int = 0


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
    """A context leg offers pages. They stay pinned until its `SendOutcome`. `sources` lists blocks from token 0.

    Offered whole, or chunk by chunk: `chunk` counts from 0 (from 1 after BindContext), `more` says that others follow,
    `tokens` are the chunk's. `dp_rank`: the attention-dp group that holds the pages. `step` of the model that computes
    them, which has not begun: their layers are sent as they are computed; 0: every kernel that writes them is over.
    """

    key: RequestKey
    tokens: TokenRange
    sources: tuple[RankBlocks, ...]
    chunk: int = 0
    more: bool = False
    dp_rank: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Holder:
    """The context instance that holds the pages of an attempt, and which of its attention-dp groups does."""

    endpoint: str
    instance_id: str
    incarnation: bytes
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """A generation leg exposes pages (blocks from `tokens.begin`) and asks `holder` for its cache.

    The caller guarantees that every kernel that used the pages before has finished. `may_retry`: after a failure the
    same attempt may be asked for once more, with fresh pages; the holder keeps its own until then. `dp_rank`: the
    attention-dp group of this instance that the pages belong to; every rank of it that holds cache lists its blocks.
    `timeout_s`: what is left of the request's time for the cache; 0 = as the hub is configured.
    """

    key: RequestKey
    tokens: TokenRange
    destinations: tuple[RankBlocks, ...]
    holder: Holder
    trace: TraceContext | None = None
    may_retry: bool = False
    dp_rank: int = 0
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Withdraws an offer or a receive. Its outcome still comes, when no write can touch the pages."""

    key: RequestKey


# --- hub -> scheduler role


class TransferStats(NamedTuple):
    """What one writer's work cost. Durations in seconds. `bounced`: bytes that went through chunks;
    `predicted`: what the cost model expected from the order to the end, 0 when it was not asked.

    Of chunks, all of them together: `credit`, no chunk could go on because room at the peer was waited for; `gather`,
    copies out of the cache; `scatter`, copies into the cache, which only the generation side knows. They overlap each
    other and `wire`. `why` the bytes went this way, for people.
    """

    bytes: int = 0
    descriptors: int = 0
    path: str = ""
    queue: float = 0.0
    plan: float = 0.0
    post: float = 0.0
    wire: float = 0.0
    bounced: int = 0
    predicted: float = 0.0
    credit: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0
    why: str = ""


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
    `may_retry`: the holder still keeps its pages; ask once more with fresh ones, or cancel.
    """

    key: RequestKey
    settled: bool
    failure: TransferFailure = TransferFailure.NONE
    reason: str = ""
    stats: HandoffStats | None = None
    may_retry: bool = False


# --- hub -> rank role


@dataclass(frozen=True, slots=True)
class LoadPeer:
    """Load the agents of a peer instance, build the plans, warm the connections. Answered by `PeerLoaded`.

    `ranks`: all of the own instance in flat order, among which writers are elected; empty: this is the only one.
    `bounce`: both sides can bounce. `require_path`: what the peer requires the name of the way to contain.
    """

    peer: InstanceInfo
    ranks: tuple[RankInfo, ...] = ()
    bounce: bool = False
    require_path: str = ""


@dataclass(frozen=True, slots=True)
class ForgetPeer:
    """Drop a peer's agents and plans. Only sent when no write to it is open."""

    instance_id: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class WriteOrder:
    """Write one attempt's tokens to one peer. Answered by one `TransferNotice` for each destination rank it names.

    `sources` lists this rank's blocks from token 0; `destinations` the peer's blocks from `tokens.begin`. `window` is
    the part of `tokens` to write now, None for all; `receive` the number of the KvRequest that is served; `step` as in
    SendOffer.
    """

    key: RequestKey
    instance_id: str
    incarnation: bytes
    tokens: TokenRange
    sources: tuple[RankBlocks, ...]
    destinations: tuple[RankBlocks, ...]
    receive: int = 0
    window: TokenRange | None = None
    step: int = 0


@dataclass(frozen=True, slots=True)
class CancelWrite:
    """Do not start what has not been posted. The notices of the orders still come."""

    key: RequestKey
    receive: int = 0


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
    """Answer to `LoadPeer`. Empty `incompatibilities`: the pair works. `later`: the reason passes by itself. `probes`:
    what was measured, if anything."""

    instance_id: str
    incarnation: bytes
    incompatibilities: tuple[Incompatibility, ...] = ()
    plan_digest: bytes = b""
    later: bool = False
    probes: tuple[PairProbe, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """A rectangle of tokens x global layers of one view of one layer group, on the destination."""

    layer_group: int
    view: int
    tokens: TokenRange
    layer_begin: int
    layer_end: int


class TransferNotice(NamedTuple):
    """One writer is done with one attempt and never touches the destination again.

    `not_held`: nothing was written because the context side does not hold the pages (never offered, expired,
    withdrawn); only with NEVER_STARTED. `receive`: number of the KvRequest that this answers. `chunks`: how many
    BounceChunks belong to what was delivered.
    """

    key: RequestKey
    src_rank: int
    dst_rank: int
    outcome: WriterOutcome
    extents: tuple[Extent, ...] = ()
    reason: str = ""
    stats: TransferStats = TransferStats()
    not_held: bool = False
    receive: int = 0
    chunks: int = 0


SchedulerToHub = SendOffer | ReceiveRequest | CancelTransfer | ReceiveIntent | BindContext | SendFirstTokens
HubToScheduler = SendOutcome | ReceiveOutcome | BindNews
HubToRank = (
    LoadPeer | ForgetPeer | WriteOrder | CancelWrite | ProbePeer | Grant | MeetSource | PrepareScatter | ScatterOrder
)
RankToHub = RankReady | PeerLoaded | TransferNotice | PeerProbed | PeerWord | Scattered


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
