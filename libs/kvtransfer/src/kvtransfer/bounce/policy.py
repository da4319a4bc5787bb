"""What a rank needs in order to bounce: arenas, a copier, and who decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class BouncePolicy:
    """Frozen but for the book.

    send, receive   arenas, in the memory of the cache; the owner keeps them as long as the agent lives. None: this rank
                    sends, or takes, no chunks
    unit_bytes      the smallest chunk, and what every peer is sure of
    chunk_bytes     the largest chunk
    depth           chunks of one transfer that are under way at once
    max_peers       how many peers each arena has room for at least. Raises ArenaError for one that is too small
    """

    send: RegisteredRegion | None = None
    receive: RegisteredRegion | None = None
    copier: Copier = field(default_factory=HostCopier)
    staging: StagingPolicy = StagingPolicy.COST
    unit_bytes: int = UNIT_BYTES
    chunk_bytes: int = 128 << 20
    depth: int = 3
    max_peers: int = 1
    book: CostBook = field(default_factory=lambda: CostBook(HOST))

    def __post_init__(self) -> None:
        if not 0 < self.unit_bytes <= self.chunk_bytes:
            raise ArenaError(
                f"transfer.bounce_chunk_bytes = {self.chunk_bytes} is smaller than a unit of {self.unit_bytes} bytes"
            )
        least = self.unit_bytes * self.max_peers
        for name, arena in (("send", self.send), ("receive", self.receive)):
            if arena is not None and arena.size_bytes < least:
                raise ArenaError(
                    f"the {name} arena has {arena.size_bytes} bytes, too few for {self.max_peers} peers with a chunk "
                    f"of {self.unit_bytes} bytes each: the least is {least} bytes (transfer.arena_bytes, "
                    "transfer.max_peers)"
                )

    @property
    def regions(self) -> tuple[RegisteredRegion, ...]:
        """What the agent has to register besides the cache."""
        return tuple(one for one in (self.send, self.receive) if one is not None)

    def limits(self, arena: RegisteredRegion) -> ChunkLimits:
        """Sizes of chunks to a peer with this arena, so that `depth` of them fit into both."""
        room = min(arena.size_bytes, arena.size_bytes if self.send is None else self.send.size_bytes)
        return ChunkLimits(self.unit_bytes, max(self.unit_bytes, min(self.chunk_bytes, room // self.depth)))


def starting_cost(kind: MemoryKind) -> PathCost:
    """Costs of a path before anything was measured."""
    return DEVICE if kind is MemoryKind.VRAM else HOST
