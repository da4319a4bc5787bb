"""common.proto and what the peer messages and the local messages share: keys, ranges, traces, reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.v1 import common_pb2, errors_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import (
    Incompatibility,
    RequestKey,
    TokenRange,
    TraceContext,
)
from kvtransfer.wire._read import (
    limited,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MIN_REQUEST_ID = 1 << 40
MAX_REQUEST_ID = 1 << 63
MAX_INCOMPATIBILITIES = 1 << 12


def key_to_pb(key: RequestKey) -> common_pb2.RequestKey:
    """Raises ValueError for a local id: those never travel."""
    pb = common_pb2.RequestKey()
    write_key(key, pb)
    return pb


def local_id(request_id: int) -> ValueError:
    """What is raised for an id that is not to leave its worker."""
    return ValueError(f"request id {request_id} is not in [2^40, 2^63): local ids never travel")


def write_key(key: RequestKey, pb: common_pb2.RequestKey) -> None:
    """Into a field of a message. Raises ValueError for a local id."""
    request_id, attempt = key
    if not MIN_REQUEST_ID <= request_id < MAX_REQUEST_ID:
        raise local_id(request_id)
    pb.request_id, pb.attempt = request_id, attempt


def key_from_pb(pb: common_pb2.RequestKey, field: str = "key") -> RequestKey:
    """Raises WireError when the id is outside [2^40, 2^63)."""
    request_id = pb.request_id
    if not MIN_REQUEST_ID <= request_id < MAX_REQUEST_ID:
        raise WireError(f"{field}.request_id", f"{request_id} is not in [2^40, 2^63)")
    return RequestKey(request_id, pb.attempt)


def tokens_to_pb(tokens: TokenRange) -> common_pb2.TokenRange:
    """Any range of positions below 2^32."""
    return common_pb2.TokenRange(begin=tokens.begin, end=tokens.end)


def write_tokens(tokens: TokenRange, pb: common_pb2.TokenRange) -> None:
    """Into a field of a message; it is there afterwards, also when both ends are 0."""
    pb.SetInParent()
    pb.begin, pb.end = tokens.begin, tokens.end


def tokens_from_pb(pb: common_pb2.TokenRange, field: str = "tokens") -> TokenRange:
    """May be empty. Raises WireError when it runs backwards."""
    begin, end = pb.begin, pb.end
    if begin > end:
        raise WireError(field, f"[{begin}, {end}) runs backwards")
    return TokenRange(begin, end)


def trace_to_pb(trace: TraceContext | None) -> common_pb2.TraceContext | None:
    """None stays absent."""
    if trace is None:
        return None
    return common_pb2.TraceContext(trace_id=trace.trace_id, span_id=trace.span_id, flags=trace.flags)


def trace_from_pb(pb: common_pb2.TraceContext, field: str = "trace") -> TraceContext:
    """Raises WireError when an id has the wrong length."""
    if len(pb.trace_id) != 16 or len(pb.span_id) != 8:
        raise WireError(field, f"ids of {len(pb.trace_id)} and {len(pb.span_id)} bytes, not 16 and 8")
    return TraceContext(pb.trace_id, pb.span_id, pb.flags)


def incompatibilities_to_pb(values: Iterable[Incompatibility]) -> list[errors_pb2.Incompatibility]:
    """In order."""
    return [
        errors_pb2.Incompatibility(field=one.field, mine=one.mine, yours=one.yours, remedy=one.remedy) for one in values
    ]


def incompatibilities_from_pb(pbs: Sequence[errors_pb2.Incompatibility], field: str) -> tuple[Incompatibility, ...]:
    """Raises WireError when the list or a text is too long."""
    limited(pbs, MAX_INCOMPATIBILITIES, field)
    return tuple(
        Incompatibility(text(pb.field, field), text(pb.mine, field), text(pb.yours, field), text(pb.remedy, field))
        for pb in pbs
    )
