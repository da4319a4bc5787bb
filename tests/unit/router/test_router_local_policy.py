"""Policies that a router decides by itself, over a cluster as the coordinator's stream describes it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from isthmus_core.errors import DuplicateRequest, NoCapacity
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_router.cluster_watch import WatchedMember
from isthmus_router.local_placement import LocalPlacement
from isthmus_router.local_policy import PowerOfTwo, RoundRobin, allowed, units_of
from isthmus_router.ports import PlacementRequest, Shape


def member(name: str, role: str, *, busy: int = 0, usable: bool = True, model: str = "m") -> WatchedMember:
    return WatchedMember(name, name.encode().ljust(16, b"."), f"{name}:1", role, model, 100, usable, busy, 0, 0, 10)


class View:
    """Stands for a ClusterView: every context instance with every generation instance."""

    def __init__(self, *members: WatchedMember) -> None:
        self._members = members

    def members(self) -> list[WatchedMember]:
        return list(self._members)

    def ready_pairs(self) -> list[tuple[WatchedMember, WatchedMember]]:
        usable = [one for one in self._members if one.usable]
        contexts = [one for one in usable if one.role == "context"]
        return [(one, other) for one in contexts for other in usable if other.role == "generation"]


def question(number: int = 0, **changes: object) -> PlacementRequest:
    return PlacementRequest(RequestKey(MIN_GLOBAL_ID + number), "m", 10, 10, **changes)  # type: ignore[arg-type]


CLUSTER = View(
    member("c-0", "context"),
    member("c-1", "context"),
    member("g-0", "generation"),
    member("g-1", "generation"),
    member("u-0", "context_and_generation"),
)


def test_every_pair_and_every_instance_gets_its_turn() -> None:
    units = allowed(units_of(CLUSTER)["m"], question(shape=Shape.SPLIT))
    policy = RoundRobin()
    chosen = [policy.choose(units, "m") for _ in range(8)]
    pairs = Counter((context.instance_id if context else "", generation.instance_id) for context, generation in chosen)
    assert pairs == Counter({(c, g): 2 for c in ("c-0", "c-1") for g in ("g-0", "g-1")})


def test_a_request_gets_the_shape_it_wants() -> None:
    units = units_of(CLUSTER)["m"]
    assert len(allowed(units, question())) == 3
    assert [unit.context for unit in allowed(units, question(shape=Shape.UNSPLIT))] == [None]
    with pytest.raises(NoCapacity):
        allowed([unit for unit in units if unit.context], question(shape=Shape.UNSPLIT))


def test_excluded_instances_get_nothing() -> None:
    units = units_of(CLUSTER)["m"]
    gone = tuple(one.incarnation for one in CLUSTER.members() if one.instance_id in ("c-0", "g-1", "u-0"))
    left = allowed(units, question(excluded=gone))
    assert [
        (unit.context and unit.context.instance_id, [g.instance_id for g in unit.generations]) for unit in left
    ] == [("c-1", ["g-0"])]
    everybody = tuple(one.incarnation for one in CLUSTER.members())
    with pytest.raises(NoCapacity, match="besides 5 that failed"):
        allowed(units, question(excluded=everybody))


def test_the_less_loaded_of_two_is_chosen() -> None:
    cluster = View(member("u-0", "context_and_generation", busy=50), member("u-1", "context_and_generation"))
    policy = PowerOfTwo(lambda _: 0, random.Random(1))
    chosen = Counter(policy.choose(units_of(cluster)["m"], "m")[1].instance_id for _ in range(1000))
    assert 0.7 < chosen["u-1"] / 1000 < 0.8, "both draws hit the busy one in a quarter of the cases"


async def test_a_router_counts_its_own_requests() -> None:
    cluster = View(*(member(f"u-{index}", "context_and_generation") for index in range(4)))
    local = LocalPlacement(None, lambda: cluster, "power_of_two", lambda: 0.0)  # type: ignore[arg-type]
    placed = Counter[str]()
    for number in range(400):
        placed[(await local.select(question(number), 1)).generation.instance_id] += 1
    assert max(placed.values()) - min(placed.values()) < 20
    with pytest.raises(DuplicateRequest):
        await local.select(question(0), 1)
    for number in range(400):
        local.finish(question(number).key)
        local.finish(question(number).key)
    assert await local.select(question(0), 1)


async def test_a_cluster_that_changes_is_seen_in_time() -> None:
    now, cluster = 0.0, View(member("u-0", "context_and_generation"))
    local = LocalPlacement(None, lambda: cluster, "round_robin", lambda: now)  # type: ignore[arg-type]
    await local.select(question(0), 1)
    cluster = View(member("u-0", "context_and_generation", usable=False))
    now = 1.0
    with pytest.raises(NoCapacity, match="serves m"):
        await local.select(question(1), 1)
