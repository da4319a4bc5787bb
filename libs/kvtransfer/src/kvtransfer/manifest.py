"""What a receiver needs and what has arrived: sets of rectangles tokens x layers, per writer, destination and view.

            layer
            ▲   ┌───────────┐
            │   │ delivered │ ┌──── need ────┐      complete ⇔ delivered covers the need, for every
            │   └───────────┘ └──────────────┘                 (src_rank, dst_rank, layer group, view)
            └──────────────────────▶ token

A repeat of an extent is idempotent; one that overlaps another without being equal to it, or leaves the need, is a
contradiction: no writer of the plan cuts that way, so the cache must not be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtransfer.errors import ManifestError
from kvtransfer.ports import Extent
from kvtransfer.rectangles import Rectangles

Pair = tuple[int, int]


def area(extent: Extent) -> int:
    """Tokens x layers."""
    return len(extent.tokens) * (extent.layer_end - extent.layer_begin)


@dataclass(frozen=True, slots=True)
class Need:
    """What must arrive before decode: per (src_rank, dst_rank) disjoint extents. Empty extents are dropped."""

    extents: Mapping[Pair, tuple[Extent, ...]]

    @classmethod
    def of(cls, extents: Mapping[Pair, Iterable[Extent]]) -> Need:
        """Raises ManifestError when two extents of one pair overlap."""
        kept: dict[Pair, tuple[Extent, ...]] = {}
        for pair, parts in extents.items():
            full, seen = tuple(part for part in parts if area(part) > 0), Rectangles()
            for part in full:
                if seen.clash(part):
                    raise ManifestError(f"the need of ranks {pair} names {part} twice")
                seen.add(part)
            if full:
                kept[pair] = full
        return cls(kept)

    @property
    def writers(self) -> tuple[Pair, ...]:
        """The (src_rank, dst_rank) pairs that have something to deliver, sorted."""
        return tuple(sorted(self.extents))


class Manifest:
    """Collects the extents of one attempt. Not thread-safe."""

    def __init__(self, need: Need) -> None:
        self._need = {pair: Rectangles(parts) for pair, parts in need.extents.items()}
        self._arrived: dict[Pair, set[Extent]] = {}
        self._covered: dict[Pair, Rectangles] = {}
        self._missing = sum(area(part) for parts in need.extents.values() for part in parts)

    def add(self, src_rank: int, dst_rank: int, extents: Iterable[Extent]) -> None:
        """Adds what a writer reports. Raises ManifestError, and changes nothing, when it contradicts need or itself."""
        pair = (src_rank, dst_rank)
        wanted, known = self._need.get(pair, Rectangles()), self._arrived.setdefault(pair, set())
        covered, fresh, together = self._covered.setdefault(pair, Rectangles()), set[Extent](), Rectangles()
        for extent in extents:
            if area(extent) <= 0:
                raise ManifestError(f"rank {src_rank} reports an empty extent for rank {dst_rank}: {extent}")
            if extent in known or extent in fresh:
                continue
            if not wanted.covers(extent):
                raise ManifestError(f"rank {src_rank} wrote to rank {dst_rank} what was not asked for: {extent}")
            if other := covered.clash(extent) or together.clash(extent):
                raise ManifestError(f"rank {src_rank} reports {extent} over {other} for rank {dst_rank}")
            fresh.add(extent)
            together.add(extent)
        for extent in fresh:
            covered.add(extent)
        known |= fresh
        self._missing -= sum(area(extent) for extent in fresh)

    @property
    def complete(self) -> bool:
        """True when everything needed has arrived. An empty need is complete from the start."""
        return self._missing == 0

    @property
    def missing(self) -> int:
        """Tokens x layers x views that have not arrived."""
        return self._missing
