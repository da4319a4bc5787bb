"""What is said about chunks of a bounced transfer: between hubs, and between a hub and its ranks. Frozen values.

    context rank ── PeerWord(ChunkReady) ─▶ hub ── ChunkReady ─▶ hub: room in the arena of the destination rank?
    context rank ◀── Grant ─────────────── hub ◀── Grant ─────── hub
    context rank: gather, perhaps meanwhile, write    hub ── PrepareScatter ──▶ generation rank: its plan of the pages
    context rank ── PeerWord(BounceChunk) ▶ hub ── BounceChunk ─▶ hub ── ScatterOrder ─▶ generation rank: scatter
                                                                  hub ◀── Scattered ──── generation rank

The protobuf twins live in `transfer_bounce.proto`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_core.keys import RequestKey

if TYPE_CHECKING:
    from kvtransfer.ports import RankBlocks, TokenRange
    from kvtransfer.rank_info import InstanceInfo


@dataclass(frozen=True, slots=True)
class ChunkName:
    """One chunk: the request and try, the KvRequest that is served, who writes to whom, and the writer's own count."""

    key: RequestKey
    receive: int
    src_rank: int
    dst_rank: int
    seq: int


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """Context to generation: `nbytes` of source data exist and wait for room in the arena of the destination rank, in
    its arena on the host (`host`) if it has two. Answered by a Grant, unless the attempt ends first.

    `window` and `layer_groups` as the BounceChunk will have them, so that the destination can get ready while the chunk
    is on its way. None: a peer that does not say so.
    """

    name: ChunkName
    nbytes: int
    host: bool = False
    window: TokenRange | None = None
    layer_groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """Generation to context: the writer may write `nbytes` at `offset` of the destination rank's arena, once. Less than
    asked for: the rest is asked for again. 0: no room will come, the writer has to give up."""

    name: ChunkName
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BounceChunk:
    """Context to generation: the packed bytes [begin, end) of a chunk of tokens lie at `offset` of the arena.

    `window`: tokens of the chunk. `layer_groups`: groups of the destination that are packed, in order; the others were
    written directly. `host`: as it was asked for. The grant of that name is used up.
    """

    name: ChunkName
    window: TokenRange
    begin: int
    end: int
    offset: int
    layer_groups: tuple[int, ...]
    host: bool = False


@dataclass(frozen=True, slots=True)
class PeerWord:
    """Context rank to its hub: say this to the peer."""

    instance_id: str
    incarnation: bytes
    body: ChunkReady | BounceChunk


@dataclass(frozen=True, slots=True)
class MeetSource:
    """Generation hub to its ranks: this instance may send chunks. `own`: the instance of the rank."""

    peer: InstanceInfo
    own: InstanceInfo


@dataclass(frozen=True, slots=True)
class PrepareScatter:
    """Generation hub to the destination rank: chunks of this window and these layer groups will come from that writer.
    Not answered. `tokens` and `destinations` as in the ScatterOrders that follow."""

    instance_id: str
    incarnation: bytes
    name: ChunkName
    window: TokenRange
    layer_groups: tuple[int, ...]
    tokens: TokenRange
    destinations: tuple[RankBlocks, ...]


@dataclass(frozen=True, slots=True)
class ScatterOrder:
    """Generation hub to the destination rank: copy the chunk into these pages. Answered by Scattered. `tokens` and
    `destinations` (this rank's lists) are those of the KvRequest."""

    instance_id: str
    incarnation: bytes
    chunk: BounceChunk
    tokens: TokenRange
    destinations: tuple[RankBlocks, ...]


@dataclass(frozen=True, slots=True)
class Scattered:
    """Generation rank to its hub: the chunk is not needed any more. `problem`: why nothing was copied. `seconds` that
    the copy took."""

    name: ChunkName
    problem: str = ""
    seconds: float = 0.0
