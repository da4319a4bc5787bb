"""Leases on the node and process bits of request ids.

    granted ──stream broken──▶ kept ──ttl + detection──▶ free        presented again before that: granted

Two holders of the same bits must never mint the same time field. Three things see to it: bits are not granted again
before their holder must have stopped minting; a new grant begins after everything an earlier holder can have used; and
free bits are reused oldest first, so that 16,384 grants lie between two uses. A coordinator that has just started does
not know the holders of its predecessor: it grants nothing until all of them have presented their lease or stopped. What
it relies on is a system clock that does not go back over its restart; while it runs, its own clock counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from isthmus_core.errors import InvalidRequest, IsthmusError, NoCapacity
from isthmus_core.ids import NODE_BITS, PROCESS_BITS, TIME_BITS, IdLease

# A holder notices within this time that its stream is broken (keepalive: 20 s + 10 s); its ttl runs from then.
DETECTION_S = 30.0
ALL_BITS = 1 << (NODE_BITS + PROCESS_BITS)


class LeaseRefused(IsthmusError):
    """The presented lease is not the presenter's: it must stop minting under it and ask for another."""

    code = grpc.StatusCode.FAILED_PRECONDITION


@dataclass(slots=True)
class _Entry:
    """Bits that were leased. `floor_ms` at time `floor_at`: first time field free then; it grows with the clock."""

    router_id: str
    floor_ms: int
    floor_at: float
    token: int | None = None
    free_at: float = 0.0

    def floor(self, now: float) -> int:
        """First time field that no holder has used by `now`: one millisecond of rounding is allowed for."""
        return self.floor_ms + int((now - self.floor_at) * 1000) + 2


class LeaseTable:
    """Bits by number (node bits high). Times `now` in seconds on a monotonic clock, `wall_ms` since 2026-01-01.

    `grace_s`: no new bits before this time has passed since `started`. `first`: where granting begins; a coordinator
    takes a random one, so that after a restart it grants what its predecessor has hardly granted.
    """

    def __init__(self, ttl_s: float, *, grace_s: float, started: float, first: int = 0) -> None:
        self._ttl_s = ttl_s
        self._grants_from = started + grace_s
        self._next = first % ALL_BITS
        self._entries: dict[int, _Entry] = {}

    def grant(self, token: int, router_id: str, now: float, wall_ms: int) -> IdLease:
        """New bits for the stream `token`. Raises NoCapacity during the grace after a restart, or when none is free."""
        if now < self._grants_from:
            left = self._grants_from - now
            raise NoCapacity(
                f"the coordinator has just started: routers of an earlier one may hold request ids for {left:.1f} s "
                "(coordinator.id_grace_s)",
                retry_after_s=left,
            )
        for step in range(ALL_BITS):
            bits = (self._next + step) % ALL_BITS
            entry = self._entries.get(bits)
            if entry is None or (entry.token is None and entry.free_at <= now):
                break
        else:
            raise NoCapacity(f"all {ALL_BITS} leases on request ids are held", retry_after_s=self._ttl_s)
        self._next = bits + 1
        base_ms = wall_ms if entry is None else max(wall_ms, entry.floor(now))
        return self._hold(bits, _Entry(router_id, base_ms, now, token))

    def present(self, token: int, router_id: str, lease: IdLease, now: float) -> tuple[IdLease, int | None]:
        """A lease presented after a reconnect. Returns it confirmed, and the token of the stream that held it until now
        when that is still thought to live: a broken one of the same router.

        Raises LeaseRefused when the bits are held by, or kept for, another router, or were used by others since.
        """
        bits = _bits(lease)
        entry = self._entries.get(bits)
        old_token: int | None = None
        if entry is not None:
            kept = entry.token is not None or entry.free_at > now
            if kept and entry.router_id != router_id:
                raise LeaseRefused(
                    f"request id bits {lease.node_id}/{lease.process_id} are leased to router {entry.router_id}"
                )
            if not kept and lease.base_ms < entry.floor(entry.free_at):
                raise LeaseRefused(f"the lease on bits {lease.node_id}/{lease.process_id} has lapsed")
            old_token = entry.token
        floor_ms = lease.base_ms if entry is None else max(lease.base_ms, entry.floor(now))
        return self._hold(bits, _Entry(router_id, floor_ms, now, token), lease.base_ms), old_token

    def release(self, token: int, now: float) -> None:
        """The stream is over. Its router may mint on and come back for a while."""
        for entry in self._entries.values():
            if entry.token == token:
                entry.token = None
                entry.free_at = now + self._ttl_s + DETECTION_S

    def held(self) -> int:
        """Leases of streams that live."""
        return sum(entry.token is not None for entry in self._entries.values())

    def _hold(self, bits: int, entry: _Entry, base_ms: int | None = None) -> IdLease:
        base_ms = entry.floor_ms if base_ms is None else base_ms
        if base_ms >> TIME_BITS:
            raise InvalidRequest("lease.base_ms", str(base_ms), f"use a time below 2^{TIME_BITS} ms since 2026-01-01")
        self._entries[bits] = entry
        return IdLease(bits >> PROCESS_BITS, bits & ((1 << PROCESS_BITS) - 1), base_ms, self._ttl_s)


def _bits(lease: IdLease) -> int:
    if lease.node_id >> NODE_BITS or lease.process_id >> PROCESS_BITS:
        raise InvalidRequest(
            "lease", f"{lease.node_id}/{lease.process_id}", f"present {NODE_BITS} node and {PROCESS_BITS} process bits"
        )
    return lease.node_id << PROCESS_BITS | lease.process_id
