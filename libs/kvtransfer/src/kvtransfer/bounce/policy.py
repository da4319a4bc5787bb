"""What a rank needs in order to bounce: arenas, a copier, and who decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.bounce.arena import check_room
from kvtransfer.bounce.copying import Copier, HostCopier
from kvtransfer.cost.book import DEVICE, HOST, CostBook
from kvtransfer.cost.policies import ChunkLimits, StagingPolicy
from kvtransfer.errors import ArenaError
from kvtransfer.pools import MemoryKind

if TYPE_CHECKING:
    from kvtransfer.cost.model import PathCost
    from kvtransfer.pools import RegisteredRegion

# The smallest chunk, as hubs count room for every peer.
UNIT_BYTES = 1 << 20
# Where nobody says anything else: the largest chunk, and how many of a transfer are under way.
CHUNK_BYTES, DEPTH = 256 << 20, 4


def _nothing_to_lock() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class BouncePolicy:
    """Frozen but for the book.

    send, receive   arenas, in the memory of the cache; the owner keeps them as long as the agent lives. None: this rank
                    sends, or takes, no chunks
    host_send, host_receive   likewise on the host, where the cache is not: for peers whose cache lies on the host.
                    A write across kinds of memory is hundreds of times slower
    lock_host       called before either of them is copied from or to; says what stands in the way, once for all
    unit_bytes      the smallest chunk, and what every peer is sure of
    chunk_bytes     the largest chunk
    depth           chunks of one transfer that are under way at once, at most
    max_peers       how many peers each arena has room for at least. Raises ArenaError for one that is too small
    """

    send: RegisteredRegion | None = None
    receive: RegisteredRegion | None = None
    host_send: RegisteredRegion | None = None
    host_receive: RegisteredRegion | None = None
    lock_host: Callable[[], str] = _nothing_to_lock
    copier: Copier = field(default_factory=HostCopier)
    staging: StagingPolicy = StagingPolicy.COST
    unit_bytes: int = UNIT_BYTES
    chunk_bytes: int = CHUNK_BYTES
    depth: int = DEPTH
    max_peers: int = 1
    book: CostBook = field(default_factory=lambda: CostBook(HOST))

    def __post_init__(self) -> None:
        if not 0 < self.unit_bytes <= self.chunk_bytes:
            raise ArenaError(
                f"transfer.bounce_chunk_bytes = {self.chunk_bytes} is smaller than a unit of {self.unit_bytes} bytes"
            )
        for name in ("send", "receive", "host_send", "host_receive"):
            arena: RegisteredRegion | None = getattr(self, name)
            if arena is not None:
                what = f"the {name.replace('_', ' ')} arena"
                check_room(what, arena.size_bytes, self.unit_bytes, self.max_peers)

    @property
    def regions(self) -> tuple[RegisteredRegion, ...]:
        """What the agent has to register besides the cache."""
        arenas = (self.send, self.receive, self.host_send, self.host_receive)
        return tuple(one for one in arenas if one is not None)

    @property
    def announced(self) -> dict[str, RegisteredRegion]:
        """What peers have to know, by the names in RankInfo."""
        found = {"arena": self.receive, "host_arena": self.host_receive}
        return {name: one for name, one in found.items() if one is not None}

    def send_for(self, mine: MemoryKind, peer: MemoryKind) -> RegisteredRegion | None:
        """The arena for chunks to a peer whose cache lies in that kind of memory; `mine`: where this rank's does."""
        return self.send if mine.meets(peer) else self.host_send

    def limits(self, send: RegisteredRegion, receive: RegisteredRegion) -> ChunkLimits:
        """Sizes of chunks from one arena to the other. Two of the largest fit into both."""
        room = min(send.size_bytes, receive.size_bytes)
        share = max(1, min(2, self.depth))
        return ChunkLimits(
            self.unit_bytes, max(self.unit_bytes, min(self.chunk_bytes, room // share)), room, self.depth
        )


def starting_cost(kind: MemoryKind) -> PathCost:
    """Costs of a path before anything was measured."""
    return DEVICE if kind is MemoryKind.VRAM else HOST
