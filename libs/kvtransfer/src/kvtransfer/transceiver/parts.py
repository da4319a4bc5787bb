"""How a packed range is cut into chunks: all alike, or by layers, so that the first go while the last are computed.

packed range     | K: l0 l1 l2 l3 | V: l0 l1 l2 l3 |
parts, by layer  K l0 l1, V l0 l1  as soon as layer 1 is there;  K l2 l3, V l2 l3  when layer 3 is
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.cost.model import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.packed import Packed

# More slices would make the last one smaller, which is all that is left to send after the step, and cost a post each.
SLICES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """Packed bytes [begin, end), to be sent when all global layers below `layers` are there."""

    begin: int
    end: int
    layers: int = 0


def equal_parts(nbytes: int, chunk_bytes: int) -> list[Part]:
    """Chunks in order, none larger than `chunk_bytes`."""
    return [Part(begin, min(begin + chunk_bytes, nbytes)) for begin in range(0, nbytes, chunk_bytes)]


def tapered_parts(nbytes: int, chunk_bytes: int) -> list[Part]:
    """Of a source that is there: chunks in order, the first and the last smaller, as the cost model has them."""
    edge, _ = cut(nbytes, chunk_bytes)
    middle = [Part(edge + one.begin, edge + one.end) for one in equal_parts(nbytes - 2 * edge, chunk_bytes)]
    return [Part(0, edge), *middle, Part(nbytes - edge, nbytes)] if edge else middle


def layered_parts(packed: Packed, chunk_bytes: int, most: int = SLICES) -> list[Part]:
    """Of a source that is being computed: at most `most` slices of layers, in order, each in ranges that follow each
    other in the packed range, none larger than `chunk_bytes`."""
    begin, end, layer = packed.layers().T
    parts: list[Part] = []
    for numbers in layer_slices_of(layer, most):
        chosen = (layer >= numbers[0]) & (layer <= numbers[-1])
        first, last = begin[chosen] >> 3, end[chosen] >> 3
        gaps = np.flatnonzero(first[1:] != last[:-1]) + 1
        starts, stops = first[[0, *gaps]], last[[*(gaps - 1), -1]]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            parts += [
                Part(start + one.begin, start + one.end, int(numbers[-1]) + 1)
                for one in equal_parts(stop - start, chunk_bytes)
            ]
    return parts


def layer_slices_of(layers: NDArray[np.int64], most: int) -> list[NDArray[np.int64]]:
    """These global layers, ascending, in at most `most` parts of equally many."""
    numbers = np.unique(layers)
    return np.array_split(numbers, min(most, len(numbers)))
