"""What a rank registers beside its cache: arenas for chunks, and scratch memory to measure paths with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.bounce.measuring import DEVICE_MOST, HOST_MOST, can_measure, measure_copies
from kvtransfer.bounce.memory import HostPages, default_arena_bytes, host_arena_bytes, make_arena, make_copier
from kvtransfer.bounce.policy import UNIT_BYTES, BouncePolicy, starting_cost
from kvtransfer.cost.book import CostBook
from kvtransfer.errors import AgentUnavailable
from kvtransfer.pools import MemoryKind
from kvtransfer.transceiver.probing import SCRATCH_BYTES, ProbePolicy, host_scratch

if TYPE_CHECKING:
    from kvtransfer.bounce.settings import BounceSettings
    from kvtransfer.pools import RegisteredRegion

log = logging.getLogger(__name__)


def bounce_policy(
    settings: BounceSettings, cache: RegisteredRegion, *, sends: bool, receives: bool
) -> tuple[BouncePolicy, list[object]]:
    """The chunks of a rank whose cache begins with `cache`, and what keeps their memory. `sends`, `receives`: what the
    rank's instance does with caches. Raises ArenaError for an arena that is too small, or that the device has no room
    for."""
    book = CostBook(starting_cost(cache.memory_kind), Path(settings.cost_file) if settings.cost_file else None)
    if settings.arena_bytes == 0:
        return BouncePolicy(staging=settings.staging_policy, book=book), []
    try:
        copier = make_copier(cache)
    except AgentUnavailable as error:
        log.warning("small runs are written one by one: %s", error)
        return BouncePolicy(staging=settings.staging_policy, book=book), []
    asked = settings.arena_bytes
    size = default_arena_bytes(cache, UNIT_BYTES, settings.max_peers) if asked is None else asked
    made = [make_arena(cache, size) if wanted else None for wanted in (sends, receives)]
    regions = [None if one is None else one[0] for one in made]
    # Beside an arena on a device: for peers whose cache lies on the host.
    on_host = host_arena_bytes(UNIT_BYTES, settings.max_peers) if cache.memory_kind is MemoryKind.VRAM else 0
    pages = [HostPages(on_host) if one is not None and on_host else None for one in made]
    policy = BouncePolicy(
        send=regions[0],
        receive=regions[1],
        host_send=None if pages[0] is None else pages[0].region,
        host_receive=None if pages[1] is None else pages[1].region,
        lock_host=lambda: next((why for one in pages if one is not None and (why := one.lock())), ""),
        copier=copier,
        staging=settings.staging_policy,
        chunk_bytes=settings.bounce_chunk_bytes,
        depth=settings.bounce_depth,
        max_peers=settings.max_peers,
        book=book,
    )
    arena = policy.regions[0]
    if can_measure(arena.size_bytes):
        most = DEVICE_MOST if cache.memory_kind is MemoryKind.VRAM else HOST_MOST
        book.copying(measure_copies(copier, arena.base_address, arena.size_bytes, most))
    kept = (*(one and one[1] for one in made), *pages)
    return policy, [one for one in kept if one is not None]


def probe_policy(cache: RegisteredRegion, *, on_connect: bool, require_path: str) -> tuple[ProbePolicy, list[object]]:
    """Scratch memory of the kind the cache lies in, so that a measurement takes the way of the cache; beside a device
    also on the host, the way to peers whose cache lies there. Also what keeps that memory. Raises ArenaError when the
    device has no room for it."""
    made: list[tuple[RegisteredRegion, object]] = [host_scratch()]
    if cache.memory_kind is MemoryKind.VRAM:
        made.insert(0, make_arena(cache, SCRATCH_BYTES))
    regions, kept = zip(*made, strict=True)
    return ProbePolicy(regions[0], on_connect, require_path, regions[1] if len(regions) > 1 else None), list(kept)
