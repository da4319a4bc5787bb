"""Errors survive every wire with code, message and typed detail."""

from __future__ import annotations

import grpc
import pytest
from isthmus.v1 import errors_pb2

from isthmus_core import errors
from isthmus_core.keys import RequestKey

KEY = RequestKey(1 << 40, 2)
ALL = [
    errors.InvalidRequest("sampling.max_tokens", "0", "use at least 1"),
    errors.UnknownModel("x", ["y"]),
    errors.DuplicateRequest(1 << 40),
    errors.NoCapacity("nobody there", 2.5),
    errors.Overloaded("waiting", 8, 1.5),
    errors.WorkerLost("ctx-0", "prefill", KEY),
    errors.TransferFailed(KEY, "ctx-0", "peer gone"),
    errors.HandoffExpired(KEY, 30.0),
    errors.ScheduleUnsupported("ctx-0", "too old"),
    errors.PeerIncompatible([("model.kv_dtype", "F32", "BF16", "same dtype on both sides")]),
    errors.DeadlineExceeded("prefill", 3),
    errors.RequestCancelled(),
    errors.InternalError("broken"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_survives_its_status(error: errors.IsthmusError) -> None:
    back = errors.from_status_bytes(error.serialize())
    assert (back.code, back.message, back.detail) == (error.code, error.message, error.detail)
    assert errors.retry_after_s(back) == errors.retry_after_s(error)


def test_garbage_and_unknown_codes_are_errors_all_the_same() -> None:
    assert errors.from_status_bytes(b"\xff\xff\xff").code is grpc.StatusCode.INTERNAL
    status = errors.InternalError("x").to_status()
    status.code = 999
    assert errors.from_status(status).code is grpc.StatusCode.UNKNOWN


def test_long_values_are_shortened_in_messages() -> None:
    error = errors.InvalidRequest("prompt", "a" * 10_000, "shorter")
    assert len(error.message) < 400
    assert isinstance(error.detail, errors_pb2.InvalidField)
