"""Numbers of many rows in one bytes field: columns of little-endian values, one after the other.

A later build may append columns; a reader takes those that it knows and leaves the rest. What many writers say for one
request is the same in most columns: such a column costs as much as one value, to write and to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvtransfer.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

V = TypeVar("V")
R = TypeVar("R")
T = TypeVar("T", bound=NamedTuple)

_MAKE: Any = getattr(tuple, "__new__")  # noqa: B009  # as an attribute its type is one that nobody can write down
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


def joined_columns(code: str, columns: Iterable[Sequence[float]]) -> bytes:
    """Columns of one length, at least 1, of `struct` code "I", "Q" or "d". Raises ValueError for a value that does not
    fit."""
    parts: list[bytes] = []
    for column in columns:
        first, rows = column[0], len(column)
        same = rows > 1 and column.count(first) == rows
        parts.append(columns_to_bytes(code, 1, (first,)) * rows if same else columns_to_bytes(code, rows, column))
    return b"".join(parts)


def is_same(column: Sequence[object]) -> bool:
    """True when all values of a column, at least one, are equal."""
    return column.count(column[0]) == len(column)


def mapped(function: Callable[[V], R], column: Sequence[V]) -> list[R]:
    """Of every value of a column, at least one; called once when all are equal."""
    return [function(column[0])] * len(column) if is_same(column) else list(map(function, column))


def named_rows(kind: type[T], columns: Sequence[Iterable[object]]) -> list[T]:
    """Named tuples, one for each row of columns of one length. Raises TypeError unless every field has its column.

    As `kind._make` would, without a Python call for each.
    """
    fields = len(kind._fields)
    if len(columns) != fields:
        raise TypeError(f"{len(columns)} columns for the {fields} fields of {kind.__name__}")
    return list(map(_MAKE, repeat(kind), zip(*columns, strict=True)))


def columns_from_bytes(code: str, data: bytes, rows: int, columns: int, field: str) -> list[Sequence[Any]]:
    """`columns` sequences of `rows` numbers each. Raises WireError when there are fewer, or half a column."""
    size = 8 if code in "Qd" else 4
    whole = len(data) == rows * columns * size
    if not whole:
        known = rows * columns * size
        if len(data) < known or not rows or len(data) % (rows * size) or len(data) > MAX_VALUES * size:
            raise WireError(field, f"{len(data)} bytes for {rows} rows, not {columns} or more columns of {size} bytes")
        data = data[:known]
    if not rows:
        return [()] * columns
    one, many, wide = _format(code, 1), _format(code, rows), rows * size
    read: list[Sequence[Any]] = []
    for begin in range(0, columns * wide, wide):
        head, column = data[begin : begin + size], data[begin : begin + wide]
        read.append(one.unpack(head) * rows if head * rows == column else many.unpack(column))
    return read
