"""The name of one try at one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class RequestKey:
    """One try at one request. `request_id` in [2^40, 2^63), `attempt` from 0."""

    request_id: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"
