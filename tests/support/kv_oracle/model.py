"""What a model caches, in global coordinates: nothing here knows ranks, blocks or addresses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """`units` pieces of `unit_bytes` each, cut between tensor-parallel ranks at unit borders.

    `copies_of_all`: every rank holds all units (state groups that do not divide).
    """

    name: str
    units: int
    unit_bytes: int
    copies_of_all: bool = False


@dataclass(frozen=True)
class Part:
    """One kind of bytes of an attention layer: `buffers` tensors [token][head][dim] of `bits`-bit elements per layer.

    `heads` = 0: the same bytes on every tensor-parallel rank (MLA latent, indexer keys).
    """

    roles: tuple[str, ...]
    buffers: int
    heads: int
    dim: int
    bits: int

    @property
    def unit(self) -> int:
        """Bytes of one token of one head."""
        assert self.dim * self.bits % 8 == 0
        return self.dim * self.bits // 8


@dataclass(frozen=True)
class State:
    """One kind of bytes of a recurrent layer: `rows` times its sections, one after the other. A state of which every
    rank holds everything is described as bytes without structure."""

    roles: tuple[str, ...]
    sections: tuple[Section, ...]
    rows: int = 1

    @property
    def opaque(self) -> bool:
        """The same bytes on every rank."""
        return all(section.copies_of_all for section in self.sections)


@dataclass(frozen=True)
class Attention:
    """Layers with one block table. `window` in tokens, None = all tokens stay."""

    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    window: int | None = None


@dataclass(frozen=True)
class Recurrent:
    """Layers with one slot per sequence."""

    layers: tuple[int, ...]
    parts: tuple[State, ...]


@dataclass(frozen=True)
class Model:
    """Groups in the model's own order; every layer is in exactly one of them."""

    groups: tuple[Attention | Recurrent, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """All global layer ids, ascending."""
        return tuple(sorted(layer for group in self.groups for layer in group.layers))
