"""Reading helpers: every value of a peer is checked here before it becomes part of a dataclass."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from kvtransfer.errors import GeometryError, WireError
from kvtransfer.rank_info import INCARNATION_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Sized
    from enum import Enum

    from numpy.typing import NDArray

M = TypeVar("M", bound=Message)
E = TypeVar("E", bound="Enum")
S = TypeVar("S", bound=np.generic)

MAX_TEXT = 1 << 16
MAX_REASON_SENT = 2048
MAX_EXTRA = 1 << 16


def parse(cls: type[M], data: bytes, field: str) -> M:
    """Deserialises one message. Raises WireError when the bytes are not one."""
    message = cls()
    try:
        message.ParseFromString(data)
    except (DecodeError, RecursionError) as error:
        raise WireError(field, f"not a {cls.__name__}: {error}") from error
    return message


def present(message: Message, name: str, field: str) -> None:
    """Raises WireError when a message field that must be there is absent."""
    if not message.HasField(name):
        raise WireError(f"{field}.{name}", "missing")


def enum(cls: type[E], value: int, field: str) -> E:
    """Raises WireError for values this build does not know, 0 = UNSPECIFIED included unless `cls` has it."""
    try:
        return cls(value)
    except ValueError:
        raise WireError(field, f"unknown value {value}") from None


def limited(values: Sized, limit: int, field: str) -> None:
    """Raises WireError when a repeated field, a string or bytes are longer than `limit`."""
    if len(values) > limit:
        raise WireError(field, f"{len(values)} entries, at most {limit} are accepted")


def text(value: str, field: str, limit: int = MAX_TEXT) -> str:
    """A string of bounded length."""
    limited(value, limit, field)
    return value


def array(data: bytes, dtype: np.dtype[S], limit: int, field: str) -> NDArray[S]:
    """One read-only view over little-endian bytes; no copy, no loop. `limit` in elements."""
    if len(data) % dtype.itemsize:
        raise WireError(field, f"{len(data)} bytes, not a multiple of {dtype.itemsize}")
    if len(data) // dtype.itemsize > limit:
        raise WireError(field, f"{len(data) // dtype.itemsize} entries, at most {limit} are accepted")
    return np.frombuffer(data, dtype=dtype)


def extra(message: Message, field: str) -> bytes:
    """Fields that this build does not know, as they came: whoever passes the message on must not lose them."""
    rest = type(message)()
    rest.CopyFrom(message)
    for known, _ in rest.ListFields():
        rest.ClearField(known.name)
    data = rest.SerializeToString()
    limited(data, MAX_EXTRA, f"{field} (unknown fields)")
    return data


def incarnation(value: bytes, field: str) -> bytes:
    """An incarnation of the right length."""
    if len(value) != INCARNATION_BYTES:
        raise WireError(f"{field}.incarnation", f"{len(value)} bytes, not {INCARNATION_BYTES}")
    return value


def seconds(value: Duration, field: str) -> float:
    """A duration in seconds; absent = 0. Raises WireError when negative or malformed."""
    if value.seconds < 0 or not 0 <= value.nanos < 1_000_000_000:
        raise WireError(field, f"{value.seconds} s {value.nanos} ns is not a duration from 0 on")
    return value.seconds + value.nanos / 1e9


def duration(value: float) -> Duration:
    """Seconds to protobuf. Raises ValueError when negative."""
    made = Duration()
    write_duration(value, made)
    return made


def write_duration(value: float, into: Duration) -> None:
    """Seconds into a message field that is there. Raises ValueError when negative."""
    if not value >= 0:
        raise ValueError(f"duration of {value} s is negative")
    into.seconds, into.nanos = divmod(round(value * 1e9), 1_000_000_000)


@contextmanager
def geometry(field: str) -> Generator[None]:
    """Turns what a dataclass refuses into a WireError of the message that carried it."""
    try:
        yield
    except GeometryError as error:
        raise WireError(f"{field}.{error.field}", f"{error.value}: {error.problem}") from error
