"""Token ids as bytes: little-endian uint32, as `isthmus.v1.TokenIds` carries them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack(ids: Iterable[int]) -> bytes:
    """Bytes of ids. Raises OverflowError for an id outside [0, 2^32)."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> tuple[int, ...]:
    """Ids in bytes. Raises ValueError when the length is no multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no list of 4-byte token ids")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)
