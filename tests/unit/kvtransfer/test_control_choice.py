"""Which context instances a generation hub keeps a stream to when there are more than `transfer.max_peers`."""

from __future__ import annotations

from collections import Counter

from kvtransfer.control.pairs import PeerAddress, choose

CONTEXTS = [PeerAddress(f"c-{number}", bytes(16), f"127.0.0.1:{number}") for number in range(200)]


def chosen(mine: str, addresses: list[PeerAddress] = CONTEXTS, limit: int = 64) -> list[str]:
    """By a hub that has asked nobody yet."""
    return [one.instance_id for one in choose(addresses, limit, mine, lambda _: False, lambda _: float("-inf"))]


def test_a_fleet_spreads_over_all_context_instances():
    taken = Counter(name for number in range(100) for name in chosen(f"g-{number}"))
    assert len(taken) == 200, "every context instance has a stream"
    assert max(taken.values()) < 2 * 100 * 64 / 200


def test_a_hub_chooses_the_same_ones_again_whatever_the_order():
    assert set(chosen("g-0")) == set(chosen("g-0", CONTEXTS[::-1]))


def test_a_context_instance_that_leaves_moves_no_other_stream():
    before = set(chosen("g-0"))
    gone = min(before)
    after = set(chosen("g-0", [one for one in CONTEXTS if one.instance_id != gone]))
    assert before - after == {gone}
    assert len(after) == 64


def test_open_requests_and_the_last_use_come_first():
    used = {"c-7": 3.0, "c-8": 2.0, "c-9": 1.0}
    kept = choose(CONTEXTS, 3, "g-0", lambda peer: peer[0] == "c-199", lambda peer: used.get(peer[0], float("-inf")))
    assert [one.instance_id for one in kept] == ["c-199", "c-7", "c-8"]


def test_all_are_kept_when_they_fit():
    assert chosen("g-0", CONTEXTS[:64]) == [one.instance_id for one in CONTEXTS[:64]]
