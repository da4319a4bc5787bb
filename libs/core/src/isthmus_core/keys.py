"""The name of one try at one request."""

from __future__ import annotations

from typing import NamedTuple


class RequestKey(NamedTuple):
    """One try at one request. `request_id` in [2^40, 2^63), `attempt` from 0. A tuple: it is the key of every table."""

    request_id: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"
