"""The chunks of hand-offs of a rank, as its configuration wants them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.bounce.measuring import DEVICE_MOST, HOST_MOST, can_measure, measure_copies
from kvtransfer.bounce.memory import HostPages, default_arena_bytes, host_arena_bytes, make_arena, make_copier
from kvtransfer.bounce.policy import UNIT_BYTES, BouncePolicy, starting_cost
from kvtransfer.cost.book import CostBook
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.errors import AgentUnavailable
from kvtransfer.pools import MemoryKind

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from kvtransfer.pools import RegisteredRegion

log = logging.getLogger(__name__)


def bounce_policy(config: IsthmusConfig, cache: RegisteredRegion) -> tuple[BouncePolicy, list[object]]:
    """The policy, and what keeps its memory. Raises ArenaError for an arena that is too small."""
    transfer = config.transfer
    book = CostBook(starting_cost(cache.memory_kind), Path(transfer.cost_file) if transfer.cost_file else None)
    staging = StagingPolicy(transfer.staging_policy)
    if transfer.arena_bytes == 0:
        return BouncePolicy(staging=staging, book=book), []
    try:
        copier = make_copier(cache)
    except AgentUnavailable as error:
        log.warning("small runs are written one by one: %s", error)
        return BouncePolicy(staging=staging, book=book), []
    send, receive = config.worker.role != "generation", config.worker.role != "context"
    asked = transfer.arena_bytes
    size = default_arena_bytes(cache, UNIT_BYTES, transfer.max_peers) if asked is None else asked
    made = [make_arena(cache, size) if wanted else None for wanted in (send, receive)]
    regions = [None if one is None else one[0] for one in made]
    # Beside an arena on a device: for peers whose cache lies on the host.
    on_host = host_arena_bytes(UNIT_BYTES, transfer.max_peers) if cache.memory_kind is MemoryKind.VRAM else 0
    pages = [HostPages(on_host) if one is not None and on_host else None for one in made]
    policy = BouncePolicy(
        send=regions[0],
        receive=regions[1],
        host_send=None if pages[0] is None else pages[0].region,
        host_receive=None if pages[1] is None else pages[1].region,
        lock_host=lambda: next((why for one in pages if one is not None and (why := one.lock())), ""),
        copier=copier,
        staging=staging,
        chunk_bytes=transfer.bounce_chunk_bytes,
        depth=transfer.bounce_depth,
        max_peers=transfer.max_peers,
        book=book,
    )
    arena = policy.regions[0]
    if can_measure(arena.size_bytes):
        most = DEVICE_MOST if cache.memory_kind is MemoryKind.VRAM else HOST_MOST
        book.copying(measure_copies(copier, arena.base_address, arena.size_bytes, most))
    kept = (*(one and one[1] for one in made), *pages)
    return policy, [one for one in kept if one is not None]
