"""What two hubs say to each other on their Connect stream: frozen values, no I/O. Twin of `transfer.proto`.

    generation ── Hello ─▶ context        context ── Welcome | Reject ─▶ generation
    generation ── KvRequest, Cancel, Reconcile, Ping ─▶ context ── TransferNotice, ReconcileReply, Pong ─▶ generation

`TransferNotice`, `Extent`, `RankBlocks` and the keys are shared with the local messages of `kvtransfer.ports`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvtransfer.bounce_ports import BounceChunk, ChunkReady, Grant
from kvtransfer.ports import Incompatibility, RankBlocks, RequestKey, TokenRange, TraceContext, TransferNotice

if TYPE_CHECKING:
    from kvtransfer.rank_info import InstanceInfo, InstanceRole

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
# Names of features that change the meaning of bytes and that this build understands. A peer that requires another one
# is refused.
REQUIRE_PATH = "require_path"
KNOWN_FEATURES: frozenset[str] = frozenset({REQUIRE_PATH})


class Capability(Enum):
    """Something a hub can do beyond the base protocol. Values are those of `isthmus.v1.Capability`."""

    RECONCILE = 1
    GENERATION_FIRST = 2
    # Chunks, packed by the first packing.
    BOUNCE_PACKING_1 = 3


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Numbers of which the smaller one of the two sides is used."""

    max_open_requests: int
    max_block_ids: int


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a stream, generation to context. Capabilities this build does not know are dropped when read:
    they can only be missing from the intersection. `require_path`: what the name of every pair's way must contain."""

    protocol_version: int
    min_protocol_version: int
    capabilities: frozenset[Capability]
    limits: TransferLimits
    required_features: tuple[str, ...]
    instance: InstanceInfo
    connection_epoch: int
    require_path: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Hello: the pair may work. Effective version, capabilities and limits; `plan_digest` is compared."""

    protocol_version: int
    capabilities: frozenset[Capability]
    limits: TransferLimits
    instance: InstanceInfo
    plan_digest: bytes
    connection_epoch: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The pair can not work, with every reason. The stream ends after it."""

    incompatibilities: tuple[Incompatibility, ...]


class KvRequest(NamedTuple):
    """Generation asks attention-dp group `src_dp` for `tokens` and exposes `destinations`: blocks from tokens.begin,
    all ranks in one message.

    `receive` counts the KvRequests of one generation incarnation from 1 on: no answer to an earlier one and no late
    copy can be taken for this one. `may_retry`: after a failure the pages are kept for one more KvRequest. A tuple, as
    all that every request says: it is made in a third of the time.
    """

    key: RequestKey
    tokens: TokenRange
    destinations: tuple[RankBlocks, ...]
    trace: TraceContext | None = None
    receive: int = 0
    may_retry: bool = False
    src_dp: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveKey:
    """One KvRequest: what Reconcile speaks of."""

    key: RequestKey
    receive: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Generation no longer wants an attempt. Every writer still answers with a TransferNotice."""

    key: RequestKey
    receive: int = 0


@dataclass(frozen=True, slots=True)
class Reconcile:
    """First message after a reconnect to the same incarnation: what happened to these KvRequests?"""

    receives: tuple[ReceiveKey, ...]


@dataclass(frozen=True, slots=True)
class ReconcileReply:
    """KvRequests still being written, and the final word on the others."""

    in_flight: tuple[ReceiveKey, ...]
    notices: tuple[TransferNotice, ...]


@dataclass(frozen=True, slots=True)
class FenceWriter:
    """Generation to context: whoever still writes for these KvRequests is to be killed. What is over is said again."""

    receives: tuple[ReceiveKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ExitReport:
    """Context to generation, by the parent of the ranks: these have exited. Nothing that they wrote lands later than
    the drain time of the fabric."""

    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Either way: this instance stops. Nothing new is asked for; what was said before still counts."""

    reason: str


@dataclass(frozen=True, slots=True)
class KvIntent:
    """Generation to context: a generation leg waits for this attempt. Names no pages; answered by Bind. Said again
    after a reconnect until the first tokens have come."""

    key: RequestKey
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Bind:
    """Context to generation: the context leg is scheduled on that attention-dp group; the KvRequest may come."""

    key: RequestKey
    dp_rank: int


@dataclass(frozen=True, slots=True)
class NotBound:
    """Context to generation: the context leg of the attempt is over, or will not come."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Context to generation: what the prefill has sampled, opaque here."""

    key: RequestKey
    payload: bytes


@dataclass(frozen=True, slots=True)
class FenceAnswer:
    """Answer to a FenceWriter that came as a call: who answers, what it can prove, what is over."""

    incarnation: bytes
    exited_incarnations: tuple[bytes, ...]
    exited_ranks: tuple[int, ...]
    notices: tuple[TransferNotice, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered with Pong of the same nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""

    nonce: int


PeerBody = (
    Hello
    | Welcome
    | Reject
    | KvRequest
    | TransferNotice
    | Cancel
    | Reconcile
    | ReconcileReply
    | FenceWriter
    | ExitReport
    | Goodbye
    | KvIntent
    | Bind
    | NotBound
    | FirstTokens
    | ChunkReady
    | Grant
    | BounceChunk
    | Ping
    | Pong
)


class Envelope(NamedTuple):
    """One ConnectRequest or ConnectResponse: everything that was queued, in order. `dst_incarnation` is empty in the
    generation side's envelopes until Welcome."""

    src_incarnation: bytes
    dst_incarnation: bytes
    messages: tuple[PeerBody, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionView:
    """What a hub knows about one attempt that holds pages. `age` in seconds in this state."""

    key: RequestKey
    side: InstanceRole
    state: str
    peer_instance_id: str
    age: float
    pages: int
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class PeerView:
    """A stream that may be used, and what both sides use on it."""

    instance_id: str
    incarnation: bytes
    protocol_version: int
    capabilities: frozenset[Capability]
    limits: TransferLimits
