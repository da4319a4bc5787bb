"""What two hubs say to each other on their Connect stream: frozen values, no I/O. Twin of `transfer.proto`.

    generation ── Hello ─▶ context        context ── Welcome | Reject ─▶ generation
    generation ── KvRequest, Cancel, Reconcile, Ping ─▶ context ── TransferNotice, ReconcileReply, Pong ─▶ generation

`TransferNotice`, `Extent`, `RankBlocks` and the keys are shared with the local messages of `kvtransfer.ports`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvtransfer.ports import Incompatibility, RankBlocks, RequestKey, TokenRange, TraceContext, TransferNotice

if TYPE_CHECKING:
    from kvtransfer.rank_info import InstanceInfo, InstanceRole

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
# Names of features that change the meaning of bytes and that this build understands. A peer that requires another one
# is refused.
KNOWN_FEATURES: frozenset[str] = frozenset()


class Capability(Enum):
    """Something a hub can do beyond the base protocol. Values are those of `isthmus.v1.Capability`."""

    RECONCILE = 1


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """Numbers of which the smaller one of the two sides is used."""

    max_open_requests: int
    max_block_ids: int


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on a stream, generation to context. Capabilities this build does not know are dropped when read:
    they can only be missing from the intersection."""

    protocol_version: int
    min_protocol_version: int
    capabilities: frozenset[Capability]
    limits: TransferLimits
    required_features: tuple[str, ...]
    instance: InstanceInfo
    connection_epoch: int


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


@dataclass(frozen=True, slots=True)
class KvRequest:
    """Generation asks for `tokens` and exposes `destinations` (blocks from tokens.begin, all ranks in one message)."""

    key: RequestKey
    tokens: TokenRange
    destinations: tuple[RankBlocks, ...]
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Generation no longer wants an attempt. Every writer still answers with a TransferNotice."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Reconcile:
    """First message after a reconnect to the same incarnation: what happened to these attempts?"""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class ReconcileReply:
    """Attempts still being written, and the final word on the others."""

    in_flight: tuple[RequestKey, ...]
    notices: tuple[TransferNotice, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered with Pong of the same nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""

    nonce: int


PeerBody = Hello | Welcome | Reject | KvRequest | TransferNotice | Cancel | Reconcile | ReconcileReply | Ping | Pong


@dataclass(frozen=True, slots=True)
class Envelope:
    """One ConnectRequest or ConnectResponse: everything that was queued, in order. `dst_incarnation` is empty in the
    generation side's envelopes until Welcome."""

    src_incarnation: bytes
    dst_incarnation: bytes
    messages: tuple[PeerBody, ...] = field(default=())


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
