"""Errors in OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import grpc
from isthmus.v1 import errors_pb2
from starlette.responses import JSONResponse

from isthmus_core.errors import IsthmusError, retry_after_s
from isthmus_router.preparation import ContextLengthExceeded

# code of the error -> HTTP status, OpenAI's type, OpenAI's code
_KINDS: Mapping[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    grpc.StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error", "duplicate_request"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "overloaded"),
    # The client hung up: nobody reads it, but a proxy may log it.
    grpc.StatusCode.CANCELLED: (499, "cancelled_error", "cancelled"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error", "unavailable"),
    # The hand-off came too late: a retry from the start can work.
    grpc.StatusCode.FAILED_PRECONDITION: (503, "service_unavailable_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error", "deadline_exceeded"),
}
_SERVER_ERROR = (500, "server_error", "internal_error")
# For errors that a retry may help and that carry no hint of their own.
_DEFAULT_RETRY_S = 1.0


class HttpError(IsthmusError):
    """Something that only HTTP has: a path, a method, a body that is too large."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = code
        self.word = code or f"http_{status}"


def error_body(error: IsthmusError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    _, kind, code = _classify(error)
    param: str | None = None
    if isinstance(error.detail, errors_pb2.InvalidField):
        param = error.detail.field
    elif isinstance(error.detail, errors_pb2.UnknownModel):
        param, code = "model", "model_not_found"
    elif isinstance(error.detail, errors_pb2.RateLimited):
        code = "rate_limit_exceeded"
    if isinstance(error, ContextLengthExceeded):
        code = "context_length_exceeded"
    return {"error": {"message": error.message, "type": kind, "param": param, "code": code}}


def error_response(error: IsthmusError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The error as a response with its status; 429 and 503 say when to retry, 401 what to show."""
    status = _classify(error)[0]
    headers = dict(headers or {})
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        hint = retry_after_s(error)
        headers["retry-after"] = str(max(1, math.ceil(_DEFAULT_RETRY_S if hint is None else hint)))
    return JSONResponse(error_body(error), status, headers)


def _classify(error: IsthmusError) -> tuple[int, str, str | None]:
    if isinstance(error, HttpError):
        return error.status, "invalid_request_error", error.error_code
    return _KINDS.get(error.code, _SERVER_ERROR)
