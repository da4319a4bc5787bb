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

Pair = tuple[int, int]


def area(extent: Extent) -> int:
    """Tokens x layers."""
    return len(extent.tokens) * (extent.layer_end - extent.layer_begin)


def overlap(a: Extent, b: Extent) -> bool:
    """True when the two share at least one (token, layer) of the same view."""
    return (
        a.layer_group == b.layer_group
        and a.view == b.view
        and max(a.tokens.begin, b.tokens.begin) < min(a.tokens.end, b.tokens.end)
        and max(a.layer_begin, b.layer_begin) < min(a.layer_end, b.layer_end)
    )


def contains(outer: Extent, inner: Extent) -> bool:
    """True when `inner` lies inside `outer`, in the same view."""
    return (
        outer.layer_group == inner.layer_group
        and outer.view == inner.view
        and outer.tokens.begin <= inner.tokens.begin
        and inner.tokens.end <= outer.tokens.end
        and outer.layer_begin <= inner.layer_begin
        and inner.layer_end <= outer.layer_end
    )


@dataclass(frozen=True, slots=True)
class Need:
    """What must arrive before decode: per (src_rank, dst_rank) disjoint extents. Empty extents are dropped."""

    extents: Mapping[Pair, tuple[Extent, ...]]

    @classmethod
    def of(cls, extents: Mapping[Pair, Iterable[Extent]]) -> Need:
        """Raises ManifestError when two extents of one pair overlap."""
        kept: dict[Pair, tuple[Extent, ...]] = {}
        for pair, parts in extents.items():
            full = tuple(part for part in parts if area(part) > 0)
            for i, part in enumerate(full):
                if any(overlap(part, other) for other in full[:i]):
                    raise ManifestError(f"the need of ranks {pair} names {part} twice")
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
        self._need = need
        self._arrived: dict[Pair, set[Extent]] = {}
        self._missing = sum(area(part) for parts in need.extents.values() for part in parts)

    def add(self, src_rank: int, dst_rank: int, extents: Iterable[Extent]) -> None:
        """Adds what a writer reports. Raises ManifestError, and changes nothing, when it contradicts need or itself."""
        pair = (src_rank, dst_rank)
        wanted = self._need.extents.get(pair, ())
        arrived = self._arrived.get(pair, set[Extent]())
        fresh: set[Extent] = set()
        for extent in extents:
            if area(extent) <= 0:
                raise ManifestError(f"rank {src_rank} reports an empty extent for rank {dst_rank}: {extent}")
            if extent in arrived or extent in fresh:
                continue
            if not any(contains(part, extent) for part in wanted):
                raise ManifestError(f"rank {src_rank} wrote to rank {dst_rank} what was not asked for: {extent}")
            for other in (*arrived, *fresh):
                if overlap(extent, other):
                    raise ManifestError(f"rank {src_rank} reports {extent} over {other} for rank {dst_rank}")
            fresh.add(extent)
        self._arrived[pair] = arrived | fresh
        self._missing -= sum(area(extent) for extent in fresh)

    @property
    def complete(self) -> bool:
        """True when everything needed has arrived. An empty need is complete from the start."""
        return self._missing == 0

    @property
    def missing(self) -> int:
        """Tokens x layers x views that have not arrived."""
        return self._missing
