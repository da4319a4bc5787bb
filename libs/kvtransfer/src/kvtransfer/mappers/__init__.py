"""How the bytes of matched buffers become runs: one module per way of cutting, chosen by the kinds of the two sides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.mappers.convert import hnd_to_nhd, nhd_to_hnd
from kvtransfer.mappers.hnd import hnd
from kvtransfer.mappers.intact import intact, is_intact
from kvtransfer.mappers.nhd import nhd
from kvtransfer.mappers.replicated import replicated
from kvtransfer.mappers.sectioned import sectioned
from kvtransfer.page_table import MapperKind
from kvtransfer.run_table import concatenate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable

# (source kind, destination kind) -> mapper. Any other pair is refused when the instances meet.
MAPPERS: dict[tuple[MapperKind, MapperKind], Callable[[BufferPairs], RunTable]] = {
    (MapperKind.HND, MapperKind.HND): hnd,
    (MapperKind.NHD, MapperKind.NHD): nhd,
    (MapperKind.HND, MapperKind.NHD): hnd_to_nhd,
    (MapperKind.NHD, MapperKind.HND): nhd_to_hnd,
    (MapperKind.REPLICATED, MapperKind.REPLICATED): replicated,
    (MapperKind.SECTIONED, MapperKind.SECTIONED): sectioned,
}


def map_any(pairs: BufferPairs) -> RunTable:
    """Runs that may be cut at any token. Raises UnalignedSlice."""
    parts: list[RunTable] = []
    for (src, dst), mapper in MAPPERS.items():
        chosen = np.flatnonzero((pairs.src.kind == src.value) & (pairs.dst.kind == dst.value))
        if len(chosen):
            parts.append(mapper(pairs.take(chosen)))
    return concatenate(parts)


def map_whole(pairs: BufferPairs) -> RunTable:
    """Runs of whole blocks. Raises UnalignedSlice."""
    same = is_intact(pairs)
    parts = [intact(pairs.take(np.flatnonzero(same)))]
    if not same.all():
        parts.append(map_any(pairs.take(np.flatnonzero(~same))))
    return concatenate(parts)
