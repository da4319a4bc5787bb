"""Numbers of many rows in one bytes field: columns of little-endian values, one after the other.

A later build may append columns; a reader takes those that it knows and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Any

from kvtransfer.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of one field.
MAX_VALUES = 1 << 22


@lru_cache(maxsize=256)
def _format(code: str, count: int) -> Struct:
    return Struct(f"<{count}{code}")


def columns_to_bytes(code: str, count: int, values: Iterable[float]) -> bytes:
    """`count` values of `struct` code "I", "Q" or "d". Raises ValueError for one that does not fit."""
    try:
        return _format(code, count).pack(*values)
    except StructError as error:
        raise ValueError(f"a value does not fit into struct code {code}: {error}") from error


def columns_from_bytes(code: str, data: bytes, rows: int, columns: int, field: str) -> list[Sequence[Any]]:
    """`columns` sequences of `rows` numbers each. Raises WireError when there are fewer, or half a column."""
    size = 8 if code in "Qd" else 4
    whole = len(data) == rows * columns * size
    if not whole:
        known = rows * columns * size
        if len(data) < known or not rows or len(data) % (rows * size) or len(data) > MAX_VALUES * size:
            raise WireError(field, f"{len(data)} bytes for {rows} rows, not {columns} or more columns of {size} bytes")
        data = data[:known]
    values = _format(code, rows * columns).unpack(data)
    return [values[at : at + rows] for at in range(0, rows * columns, rows)] if rows else [()] * columns
