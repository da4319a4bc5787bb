"""Request identity: keys, the id space, leases and the minting of ids.

    id = [0 | time_ms 39 | node 8 | process 6 | counter 10], rotated into [2^40, 2^63)

Ids below 2^40 are local to one worker and never travel. The node and process bits are leased by the coordinator;
time_ms = lease base + milliseconds since the grant on the holder's monotonic clock, so a wall clock that jumps can
not mint an id twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from isthmus_core.errors import InvalidRequest, NoCapacity
from isthmus_core.keys import RequestKey as RequestKey

MIN_GLOBAL_ID = 1 << 40
MAX_GLOBAL_ID = 1 << 63
NODE_BITS = 8
PROCESS_BITS = 6
COUNTER_BITS = 10
TIME_BITS = 39
# 2026-01-01T00:00:00Z in milliseconds: 39 bits last until 2043.
EPOCH_MS = 1_767_225_600_000


def check_request_id(request_id: int, field: str = "request_id") -> None:
    """Raise `InvalidRequest` unless the id lies in the global space [2^40, 2^63)."""
    if not MIN_GLOBAL_ID <= request_id < MAX_GLOBAL_ID:
        raise InvalidRequest(
            field, str(request_id), f"use an id in [{MIN_GLOBAL_ID}, {MAX_GLOBAL_ID}), or 0 for a new one"
        )


def new_incarnation() -> bytes:
    """16 random bytes that name one start of one process."""
    return os.urandom(16)


@dataclass(frozen=True, slots=True)
class IdLease:
    """The right to mint ids with these bits. `base_ms` counts from 2026-01-01T00:00:00Z and never goes back for the
    same bits. The holder stops minting when its stream has been broken for `ttl_s` seconds."""

    node_id: int
    process_id: int
    base_ms: int
    ttl_s: float


def compose_id(time_ms: int, node_id: int, process_id: int, counter: int) -> int:
    """The id of these fields. Raises ValueError when a field does not fit its bits."""
    fields = (
        ("time_ms", time_ms, TIME_BITS),
        ("node_id", node_id, NODE_BITS),
        ("process_id", process_id, PROCESS_BITS),
        ("counter", counter, COUNTER_BITS),
    )
    raw = 0
    for name, value, bits in fields:
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} = {value} does not fit {bits} bits")
        raw = raw << bits | value
    return raw % (MAX_GLOBAL_ID - MIN_GLOBAL_ID) + MIN_GLOBAL_ID


class SnowflakeMinter:
    """Mints request ids under a lease. Not thread-safe: one event loop owns it.

    `clock` is a monotonic clock in seconds. At most 1,024 ids a millisecond; when a burst asks for more, the minter
    borrows from the next milliseconds instead of waiting, so ids stay unique and the call never blocks.
    """

    def __init__(self, lease: IdLease, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease = lease
        self._clock = clock
        self._granted = clock()
        self._broken_since: float | None = None
        self._last_ms = -1
        self._counter = 0

    def stream_broken(self) -> None:
        """The lease's stream is gone; minting goes on for the lease's ttl."""
        if self._broken_since is None:
            self._broken_since = self._clock()

    def stream_restored(self, lease: IdLease) -> None:
        """The lease was confirmed on a new stream: same bits, possibly another ttl."""
        if (lease.node_id, lease.process_id) != (self.lease.node_id, self.lease.process_id):
            raise ValueError(f"lease for other bits: mine {self.lease}, granted {lease}")
        self._broken_since = None

    def presented(self) -> IdLease | None:
        """The lease as a reconnect presents it: `base_ms` is the first time field not used yet. None when it has
        lapsed: the bits may be somebody else's."""
        now = self._clock()
        if self._lapsed(now):
            return None
        base_ms = max(self._time_ms(now), self._last_ms + 1)
        return IdLease(self.lease.node_id, self.lease.process_id, base_ms, self.lease.ttl_s)

    def _lapsed(self, now: float) -> bool:
        return self._broken_since is not None and now - self._broken_since >= self.lease.ttl_s

    def _time_ms(self, now: float) -> int:
        return self.lease.base_ms + int((now - self._granted) * 1000)

    def mint(self) -> int:
        """A new id. Raises `NoCapacity` when the lease has lapsed."""
        now = self._clock()
        if self._lapsed(now):
            raise NoCapacity("the lease on request ids has lapsed: the coordinator can not be reached")
        time_ms = max(self._time_ms(now), self._last_ms)
        if time_ms > self._last_ms:
            self._last_ms, self._counter = time_ms, 0
        elif self._counter == (1 << COUNTER_BITS) - 1:
            self._last_ms, self._counter = time_ms + 1, 0
        else:
            self._counter += 1
        return compose_id(self._last_ms, self.lease.node_id, self.lease.process_id, self._counter)

    @property
    def last_ms(self) -> int:
        """Highest time field minted so far (base_ms - 1 when none): what a successor of these bits must exceed."""
        return max(self._last_ms, self.lease.base_ms - 1)
