"""One tree of errors for every hop: a gRPC status code, a message for people, a typed detail for programs.

Callers branch on the type (or the detail), never on the text. `to_status`/`from_status_bytes` carry an error over any
wire; `from_rpc_error` reads one back from a failed call.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from isthmus.v1 import common_pb2, errors_pb2

from isthmus_core.keys import RequestKey

_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _key(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(seconds * 1e9))
    return duration


class IsthmusError(Exception):
    """Base of all errors that may reach a client. `detail` is a message of errors.proto or None."""

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    # What metrics call it, when that is neither the detail's name nor the code's.
    word: str = ""

    def __init__(self, message: str, detail: Message | None = None, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        if code is not None:
            self.code = code

    def to_status(self) -> Status:
        """As google.rpc.Status."""
        status = Status(code=self.code.value[0], message=self.message)
        if self.detail is not None:
            status.details.add().Pack(self.detail)
        return status

    def serialize(self) -> bytes:
        """As serialized google.rpc.Status."""
        return self.to_status().SerializeToString()


class InternalError(IsthmusError):
    """A bug or a broken invariant."""


class RequestCancelled(IsthmusError):
    """The client gave up."""

    code = grpc.StatusCode.CANCELLED

    def __init__(self, message: str = "the request was cancelled") -> None:
        super().__init__(message)


class DeadlineExceeded(IsthmusError):
    """`what` did not finish within `after_s` seconds."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED

    def __init__(self, what: str, after_s: float) -> None:
        super().__init__(f"{what} did not finish within {after_s:g} s")


class Unreachable(IsthmusError):
    """A service of the cluster can not be reached."""

    code = grpc.StatusCode.UNAVAILABLE


class InvalidRequest(IsthmusError):
    """The request itself is wrong: the field, its value (shortened), what would be accepted."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: str, remedy: str) -> None:
        self.field, self.value, self.remedy = field, shorten(value), remedy
        super().__init__(
            f"{field} = {self.value}: {remedy}",
            errors_pb2.InvalidField(field=field, value=self.value, remedy=remedy),
        )


class UnknownModel(IsthmusError):
    """No instance serves the model."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, model: str, known: list[str]) -> None:
        names = ", ".join(known) if known else "none yet"
        super().__init__(
            f"unknown model {shorten(model)!r}; served: {names}",
            errors_pb2.UnknownModel(model=shorten(model), known=known),
        )


class DuplicateRequest(IsthmusError):
    """A request with this id is being served."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, request_id: int) -> None:
        super().__init__(
            f"request {request_id} is being served; use another id", errors_pb2.DuplicateRequest(request_id=request_id)
        )


class NoCapacity(IsthmusError):
    """Nothing can serve the request now."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(reason, errors_pb2.NoCapacity(reason=reason, retry_after=_duration(retry_after_s)))


class Overloaded(IsthmusError):
    """A queue is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, queue: str, limit: int, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{queue} is full ({limit}); retry in {retry_after_s:g} s",
            errors_pb2.Overloaded(queue=queue, limit=limit, retry_after=_duration(retry_after_s)),
        )


class RateLimited(IsthmusError):
    """A client has asked for more than it may. `limit`: the setting, `allowed`: its value."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, limit: str, allowed: float, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{limit} = {allowed:g} of this client is used up; retry in {retry_after_s:g} s",
            errors_pb2.RateLimited(limit=limit, allowed=allowed, retry_after=_duration(retry_after_s)),
        )


class Unauthenticated(IsthmusError):
    """The client has not shown a key that is known here. Says nothing about which part was wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED

    def __init__(self) -> None:
        super().__init__("no valid API key: send `authorization: Bearer KEY`")


class WorkerLost(IsthmusError):
    """The instance that worked on the request is gone. `phase`: "prefill", "hand-off", "decode"."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, instance_id: str, phase: str, key: RequestKey) -> None:
        super().__init__(
            f"instance {instance_id} was lost during {phase} of request {key}",
            errors_pb2.WorkerLost(instance_id=instance_id, phase=phase, key=_key(key)),
        )


class TransferFailed(IsthmusError):
    """The KV cache could not be handed off."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, key: RequestKey, context_instance_id: str, reason: str) -> None:
        super().__init__(
            f"hand-off of request {key} from {context_instance_id} failed: {reason}",
            errors_pb2.TransferFailed(key=_key(key), context_instance_id=context_instance_id, reason=reason),
        )


class HandoffExpired(IsthmusError):
    """The context side no longer holds the pages."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, key: RequestKey, held_s: float, reason: str = "") -> None:
        why = f": {reason}" if reason else ""
        super().__init__(
            f"the pages of request {key} are no longer held by the context side (hold {held_s:g} s){why}",
            errors_pb2.HandoffExpired(key=_key(key), held=_duration(held_s), reason=reason),
        )


class ScheduleUnsupported(IsthmusError):
    """The two instances do not both know how to start the legs of a request at once."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, context_instance_id: str, reason: str) -> None:
        super().__init__(
            f"generation_first with {context_instance_id}: {reason}",
            errors_pb2.ScheduleUnsupported(context_instance_id=context_instance_id, reason=reason),
        )


class PeerIncompatible(IsthmusError):
    """Two instances can not work together. `incompatibilities`: rows of (field, mine, yours, remedy)."""

    code = grpc.StatusCode.FAILED_PRECONDITION

    def __init__(self, incompatibilities: list[tuple[str, str, str, str]]) -> None:
        rows = [errors_pb2.Incompatibility(field=f, mine=m, yours=y, remedy=r) for f, m, y, r in incompatibilities]
        text = "; ".join(f"{row.field}: {row.mine} against {row.yours}" for row in rows)
        super().__init__(f"incompatible peers: {text}", errors_pb2.PeerIncompatible(incompatibilities=rows))


class RemoteError(IsthmusError):
    """An error read back from a wire: code, message and detail as the other side made them."""


class ConfigError(Exception):
    """Settings are wrong: the process must not start. Exit code 2."""

    exit_code: ClassVar[int] = 2


class StartError(Exception):
    """Settings are fine but the process can not start (port taken, coordinator absent, …). Exit code 3."""

    exit_code: ClassVar[int] = 3


def shorten(value: str, limit: int = 200) -> str:
    """`value`, cut to `limit` characters for use in a message."""
    return value if len(value) <= limit else f"{value[: limit - 1]}…"


_DETAIL_TYPES: tuple[type[Message], ...] = (
    errors_pb2.InvalidField,
    errors_pb2.UnknownModel,
    errors_pb2.DuplicateRequest,
    errors_pb2.NoCapacity,
    errors_pb2.Overloaded,
    errors_pb2.RateLimited,
    errors_pb2.WorkerLost,
    errors_pb2.TransferFailed,
    errors_pb2.HandoffExpired,
    errors_pb2.ScheduleUnsupported,
    errors_pb2.PeerIncompatible,
)


def from_status(status: Status) -> RemoteError:
    """An error from google.rpc.Status. A detail of an unknown type is dropped, code and message are kept."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    detail: Message | None = None
    for packed in status.details:
        for kind in _DETAIL_TYPES:
            if packed.TypeName() == kind.DESCRIPTOR.full_name:
                detail = kind()
                packed.Unpack(detail)
    return RemoteError(status.message, detail, code)


def from_status_bytes(data: bytes) -> RemoteError:
    """An error from serialized google.rpc.Status."""
    try:
        return from_status(Status.FromString(data))
    except DecodeError:
        return RemoteError("the peer sent a status that can not be read", None, grpc.StatusCode.INTERNAL)


def from_rpc_error(error: grpc.aio.AioRpcError) -> RemoteError:
    """An error from a failed call, with its typed detail when the other side sent one."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            return from_status_bytes(value if isinstance(value, bytes) else value.encode())
    return RemoteError(error.details() or error.code().name, None, error.code())


def retry_after_s(error: IsthmusError) -> float | None:
    """Seconds after which a retry may make sense, when the error carries a hint."""
    detail = error.detail
    if isinstance(detail, errors_pb2.NoCapacity | errors_pb2.Overloaded | errors_pb2.RateLimited):
        return detail.retry_after.ToNanoseconds() / 1e9
    return None
