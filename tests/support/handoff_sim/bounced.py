"""Chunks in the simulation: arenas behind the pages of a rank, and copies that take time.

A copy reads or writes pages like a write does: whoever is told meanwhile that the pages are free has been lied to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.page_table import MemoryKind, RegisteredRegion

from .violation import Violation

if TYPE_CHECKING:
    from kvtransfer.packed import Packed, RunPlaces
    from kvtransfer.regions import RegionPairs

    from .clock import World
    from .fabric import Port
    from .memory import Arena

# Four words a unit, room for one of each of MAX_PEERS: space is always scarce.
UNIT_BYTES, MAX_PEERS = 32, 4
ARENA_WORDS = UNIT_BYTES * MAX_PEERS // 8
_LONGEST_COPY_S, _LONGEST_SLOW_S = 0.15, 1.0


def bounce_policy(world: World, port: Port) -> BouncePolicy:
    """A sixth of the schedules bounce everything; the others nothing."""
    if not world.chunk_units:
        return BouncePolicy()
    send, receive = (_region(port.arena, number) for number in (0, 1))
    return BouncePolicy(
        send=send,
        receive=receive,
        copier=SimCopier(world, port),
        staging=StagingPolicy.ALWAYS,
        unit_bytes=UNIT_BYTES,
        chunk_bytes=world.chunk_units * UNIT_BYTES,
        depth=2,
        max_peers=MAX_PEERS,
    )


def _region(arena: Arena, number: int) -> RegisteredRegion:
    at = arena.base + (arena.pages_words + number * ARENA_WORDS) * 8
    return RegisteredRegion(at, ARENA_WORDS * 8, MemoryKind.DRAM)


class SimCopier:
    """Copies words of one rank after a while."""

    def __init__(self, world: World, port: Port) -> None:
        self._world, self._port = world, port

    def can(self, packed: Packed) -> bool:
        """Anything."""
        return packed.nbytes >= 0

    def warm(self, runs: RunPlaces, *, gather: bool) -> None:
        """Nothing."""

    def prepare(self, packed: Packed) -> None:
        """Nothing."""

    def gather(self, packed: Packed, begin: int, end: int, chunk: int) -> SimCopy:
        """Pages to chunk."""
        pairs, base = packed.part(begin, end).pairs(), self._port.arena.base
        words = _words(pairs, -base, chunk - base)
        copy = self._start(words, 0, _LONGEST_COPY_S)
        self._port.gathered.update({dst: copy.hold for _, dst in words})
        return copy

    def scatter(self, packed: Packed, begin: int, end: int, chunk: int) -> SimCopy:
        """Chunk to pages."""
        pairs, base = packed.part(begin, end).pairs(), self._port.arena.base
        words = _words(pairs, chunk - base, -base)
        return self._start(words, 1, _LONGEST_SLOW_S if self._world.slow_scatters else _LONGEST_COPY_S)

    def _start(self, words: list[tuple[int, int]], pages: int, longest: float) -> SimCopy:
        copy = SimCopy(self._port, words, pages)
        self._world.at(self._world.random.random() * longest, copy.finish)
        return copy


def _words(pairs: RegionPairs, src: int, dst: int) -> list[tuple[int, int]]:
    """(source, destination) indexes, with these added to the addresses."""
    return [
        ((a + src) // 8 + i, (b + dst) // 8 + i)
        for a, b, size in zip(pairs.src.tolist(), pairs.dst.tolist(), pairs.lengths.tolist(), strict=True)
        for i in range(size // 8)
    ]


class SimCopy:
    """One copy. `pages`: 0 when its sources are pages, 1 when its targets are."""

    def __init__(self, port: Port, words: list[tuple[int, int]], pages: int) -> None:
        self._port, self._words, self._done = port, words, False
        owners = {port.pages.owner[pair[pages] // port.arena.size] for pair in words}
        hold = owners.pop()
        if owners or hold is None or hold.closed:
            raise Violation(f"{port.name} copies pages that no attempt holds, or not one alone")
        self.hold = hold
        hold.writes += 1
        hold.posted = True
        port.copies.add(self)

    def done(self) -> bool:
        """As the copier says."""
        return self._done

    def seconds(self, noticed: float) -> float:
        """As long as it seems."""
        return noticed

    def finish(self) -> None:
        """The bytes are there, unless the process is gone."""
        if self not in self._port.copies:
            return  # it went with its process
        self._port.copies.discard(self)
        self.hold.writes -= 1
        if self._port.alive:
            words = self._port.arena.words
            for src, dst in self._words:
                words[dst] = words[src]
            self._done = True
