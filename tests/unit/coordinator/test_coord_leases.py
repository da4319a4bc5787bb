"""Leases on request id bits: no id twice, over hand-overs, broken streams, restarts and clocks that jump."""

from __future__ import annotations

import random

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_coordinator.leases import ALL_BITS, DETECTION_S, LeaseRefused, LeaseTable
from isthmus_core.errors import InvalidRequest, NoCapacity
from isthmus_core.ids import IdLease, SnowflakeMinter

TTL = 10.0
KEPT = TTL + DETECTION_S


def table(grace_s: float = 0.0, started: float = 0.0, first: int = 0) -> LeaseTable:
    return LeaseTable(TTL, grace_s=grace_s, started=started, first=first)


def bits(lease: IdLease) -> tuple[int, int]:
    return lease.node_id, lease.process_id


def test_leases_that_live_have_different_bits_that_fit_their_fields():
    leases = table(first=60)
    granted = [leases.grant(token, f"r{token}", 0.0, 5) for token in range(200)]
    assert len({bits(lease) for lease in granted}) == 200
    assert bits(granted[3]) == (0, 63)
    assert bits(granted[4]) == (1, 0)
    assert all(lease.node_id < 256 and lease.process_id < 64 for lease in granted)
    assert leases.held() == 200


def test_when_all_bits_are_held_the_next_router_is_told_so_and_freed_ones_come_after_their_time():
    leases = table()
    for token in range(ALL_BITS):
        leases.grant(token, "r", 0.0, 5)
    with pytest.raises(NoCapacity, match=str(ALL_BITS)):
        leases.grant(-1, "r", 0.0, 5)
    leases.release(77, 100.0)
    with pytest.raises(NoCapacity):
        leases.grant(-1, "r", 100.0 + KEPT - 0.1, 5)
    again = leases.grant(-1, "r", 100.0 + KEPT, 5)
    assert again.node_id * 64 + again.process_id == 77
    # The wall clock says 5 ms; the last holder may have used everything up to its release and its ttl.
    assert again.base_ms > 5 + int((100.0 + KEPT) * 1000)


def test_free_bits_are_reused_last():
    leases = table()
    leases.release(0, 0.0)
    first = leases.grant(1, "r", 0.0, 5)
    leases.release(1, 0.0)
    later = [leases.grant(token, "r", 1e6, 5) for token in range(2, 500)]
    assert bits(first) not in {bits(lease) for lease in later}


def test_a_reconnect_keeps_its_bits():
    leases = table()
    lease = leases.grant(1, "r", 0.0, 1000)
    leases.release(1, 50.0)
    again, old = leases.present(2, "r", IdLease(*bits(lease), 51_000, TTL), 55.0)
    assert bits(again) == bits(lease)
    assert old is None
    assert leases.held() == 1


def test_what_is_left_of_a_broken_stream_is_named_and_its_end_releases_nothing():
    leases = table()
    lease = leases.grant(1, "r", 0.0, 1000)
    _, old = leases.present(2, "r", lease, 5.0)
    assert old == 1
    leases.release(1, 6.0)
    assert leases.held() == 1
    with pytest.raises(LeaseRefused):
        leases.present(3, "other", lease, 1e6)


def test_bits_held_by_or_kept_for_another_router_are_refused():
    leases = table()
    lease = leases.grant(1, "r", 0.0, 1000)
    with pytest.raises(LeaseRefused, match="leased to router r") as caught:
        leases.present(2, "thief", lease, 1.0)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    leases.release(1, 2.0)
    with pytest.raises(LeaseRefused):
        leases.present(2, "thief", lease, 2.0 + KEPT - 0.1)
    assert leases.held() == 0


def test_a_lease_from_before_others_used_the_bits_is_refused():
    leases = table()
    old = leases.grant(1, "r1", 0.0, 1000)
    leases.release(1, 1.0)
    for token in range(2, ALL_BITS + 1):
        leases.grant(token, "filler", 100.0, 1000)
    assert bits(leases.grant(ALL_BITS + 1, "r2", 100.0, 1000)) == bits(old)
    leases.release(ALL_BITS + 1, 200.0)
    now = 200.0 + KEPT + 1
    with pytest.raises(LeaseRefused, match="lapsed"):
        leases.present(0, "r1", IdLease(*bits(old), 1000 + 2000, TTL), now)


def test_after_a_restart_only_presented_leases_count_for_the_grace():
    leases = table(grace_s=TTL, started=1000.0)
    with pytest.raises(NoCapacity, match="just started") as caught:
        leases.grant(1, "new", 1000.0 + TTL - 2, 5)
    assert caught.value.retry_after_s == pytest.approx(2)
    held = IdLease(0, 0, 900, TTL)
    assert bits(leases.present(2, "old", held, 1001.0)[0]) == (0, 0)
    with pytest.raises(LeaseRefused):
        leases.present(3, "thief", held, 1002.0)
    assert bits(leases.grant(1, "new", 1000.0 + TTL, 5)) != (0, 0)


def test_without_grace_a_fresh_start_grants_at_once():
    assert table(grace_s=0.0, started=1000.0).grant(1, "r", 1000.0, 5).base_ms == 5


@pytest.mark.parametrize(
    "lease", [IdLease(256, 0, 5, TTL), IdLease(0, 64, 5, TTL), IdLease(0, 0, 1 << 39, TTL)], ids=str
)
def test_a_lease_that_does_not_fit_an_id_is_refused(lease: IdLease):
    leases = table()
    with pytest.raises(InvalidRequest):
        leases.present(1, "r", lease, 0.0)
    assert leases.held() == 0


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Fleet:
    """Routers and a coordinator under one clock; the coordinator restarts, streams break, routers die and come anew."""

    def __init__(self, rng: random.Random, routers: int) -> None:
        self.rng, self.clock, self.wall_ms, self.latest_ms = rng, Clock(1000.0), 10**10, 0
        self.leases = table(started=self.clock())
        self.tokens = 0
        self.born = 0
        self.streams: dict[int, int] = {}
        self.minters: dict[int, SnowflakeMinter] = {}
        self.names: dict[int, str] = {}
        self.minted: list[int] = []
        for slot in range(routers):
            self.be_born(slot)

    def be_born(self, slot: int) -> None:
        if slot in self.streams:
            self.leases.release(self.streams.pop(slot), self.clock())
        self.minters.pop(slot, None)
        self.born += 1
        self.names[slot] = f"router-{self.born}"
        self.connect(slot)

    def connect(self, slot: int) -> None:
        """One Hello. Whatever the coordinator says is obeyed."""
        self.tokens += 1
        minter = self.minters.get(slot)
        lease = minter.presented() if minter else None
        try:
            if minter is None or lease is None:
                granted = self.leases.grant(self.tokens, self.names[slot], self.clock(), self.wall_ms)
                self.minters[slot] = SnowflakeMinter(granted, self.clock)
            else:
                minter.stream_restored(self.leases.present(self.tokens, self.names[slot], lease, self.clock())[0])
        except LeaseRefused:
            del self.minters[slot]
        except NoCapacity:
            pass
        else:
            self.streams[slot] = self.tokens

    def break_stream(self, slot: int) -> None:
        if slot in self.streams:
            self.leases.release(self.streams.pop(slot), self.clock())
            self.minters[slot].stream_broken()

    def restart(self) -> None:
        for slot in list(self.streams):
            del self.streams[slot]
            self.minters[slot].stream_broken()
        # The same bits first: the hardest case. All that a coordinator must rely on is a system clock that is not
        # behind what it was for its predecessor.
        self.wall_ms = max(self.wall_ms, self.latest_ms)
        self.leases = table(grace_s=TTL, started=self.clock())

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.wall_ms += int(seconds * 1000)
        self.latest_ms = max(self.wall_ms, self.latest_ms + int(seconds * 1000))

    def mint(self, slot: int, count: int) -> None:
        minter = self.minters.get(slot)
        if minter is None:
            return
        try:
            self.minted.extend(minter.mint() for _ in range(count))
        except NoCapacity:
            assert slot not in self.streams

    def step(self) -> None:
        slot = self.rng.randrange(len(self.names))
        match self.rng.randrange(12):
            case 0:
                self.restart()
            case 1:
                self.be_born(slot)
            case 2 | 3:
                self.break_stream(slot)
            case 4 | 5:
                if slot not in self.streams:
                    self.connect(slot)
            case 6:
                self.wall_ms += self.rng.choice([-3_600_000, -5000, 5000])
                self.latest_ms = max(self.wall_ms, self.latest_ms)
            case 7:
                self.pass_time(self.rng.choice([0.001, 1.0, TTL - 0.5, TTL + 0.5, KEPT + 1]))
            case _:
                self.pass_time(0.0004)
        for each in self.names:
            self.mint(each, self.rng.choice([0, 1, 30, 1500 if self.rng.random() < 0.02 else 5]))


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_ids_are_unique_over_any_life_of_a_fleet(seed: int):
    fleet = Fleet(random.Random(seed), routers=3)
    for _ in range(150):
        fleet.step()
    assert len(fleet.minted) == len(set(fleet.minted))


def test_a_hundred_thousand_ids_of_two_routers_over_restarts_are_unique():
    fleet = Fleet(random.Random(7), routers=2)
    while len(fleet.minted) < 100_000:
        fleet.step()
        if fleet.rng.random() < 0.3:
            for slot in fleet.names:
                fleet.mint(slot, 1200)
    assert len(fleet.minted) == len(set(fleet.minted))
