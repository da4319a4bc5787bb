"""Request ids: unique over bursts, leases and restarts; always in the global space."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_core.errors import InvalidRequest, NoCapacity
from isthmus_core.ids import (
    MAX_GLOBAL_ID,
    MIN_GLOBAL_ID,
    IdLease,
    SnowflakeMinter,
    check_request_id,
    compose_id,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_burst_in_one_millisecond_stays_unique_and_ordered() -> None:
    minter = SnowflakeMinter(IdLease(3, 5, 1_000, 10.0), FakeClock())
    ids = [minter.mint() for _ in range(5_000)]
    assert len(set(ids)) == 5_000
    assert all(MIN_GLOBAL_ID <= minted < MAX_GLOBAL_ID for minted in ids)
    assert ids == sorted(ids)


def test_ids_stay_unique_when_the_clock_stands_still_after_a_burst() -> None:
    clock = FakeClock()
    minter = SnowflakeMinter(IdLease(0, 0, 0, 10.0), clock)
    ids = [minter.mint() for _ in range(3_000)]
    clock.now += 0.001  # the burst has borrowed from milliseconds that only now pass
    ids += [minter.mint() for _ in range(3_000)]
    assert len(set(ids)) == 6_000


@given(
    st.lists(
        st.tuples(st.integers(0, 2**39 - 1), st.integers(0, 255), st.integers(0, 63), st.integers(0, 1023)),
        unique=True,
        max_size=50,
    )
)
def test_different_fields_give_different_ids(fields: list[tuple[int, int, int, int]]) -> None:
    # The rotation wraps the highest 2^40 raw values onto the lowest: times that far apart (17 years) never coexist.
    recent = [entry for entry in fields if entry[0] < 2**38]
    assert len({compose_id(*entry) for entry in recent}) == len(recent)


@pytest.mark.parametrize("field", ["time_ms", "node_id", "process_id", "counter"])
def test_a_field_that_does_not_fit_is_refused(field: str) -> None:
    values = {"time_ms": 0, "node_id": 0, "process_id": 0, "counter": 0, field: 1 << 40}
    with pytest.raises(ValueError, match=field):
        compose_id(**values)


def test_minting_stops_when_the_lease_has_lapsed_and_resumes_when_it_is_confirmed() -> None:
    clock = FakeClock()
    lease = IdLease(1, 1, 0, 10.0)
    minter = SnowflakeMinter(lease, clock)
    minter.stream_broken()
    clock.now += 9.9
    minter.mint()
    clock.now += 0.2
    with pytest.raises(NoCapacity, match="lapsed"):
        minter.mint()
    minter.stream_restored(lease)
    minter.mint()


def test_a_confirmation_for_other_bits_is_refused() -> None:
    minter = SnowflakeMinter(IdLease(1, 1, 0, 10.0), FakeClock())
    with pytest.raises(ValueError, match="other bits"):
        minter.stream_restored(IdLease(1, 2, 0, 10.0))


@pytest.mark.parametrize("bad", [0, 1, MIN_GLOBAL_ID - 1, MAX_GLOBAL_ID, -1])
def test_local_ids_are_refused_with_the_range(bad: int) -> None:
    with pytest.raises(InvalidRequest, match=str(MIN_GLOBAL_ID)):
        check_request_id(bad)
    check_request_id(MIN_GLOBAL_ID)
