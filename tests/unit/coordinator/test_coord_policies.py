"""Which instances a request gets, by policy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from coord_support import instance
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.costs import Kind, Weights
from isthmus_coordinator.membership import Load, Member, Role, Start
from isthmus_coordinator.pairs import Estimate, Pair, PairState
from isthmus_coordinator.placement import Choice, Question
from isthmus_coordinator.policies import Policy
from isthmus_core.block_keys import Keying, chain
from isthmus_core.errors import InvalidRequest, NoCapacity
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey

KEYING = Keying(b"w", b"a", "float32", 16)
WIDE = Keying(b"w", b"a", "float32", 64)
READY = Pair(PairState.READY)


class World:
    """A cluster of ready pairs whose instances can say what they have cached."""

    def __init__(self, policy: Policy, *names: str, weights: Weights | None = None, keying: Keying = KEYING) -> None:
        self.cluster = Cluster(policy, weights)
        self.members: dict[str, Member] = {}
        self.number = 0
        for name in names:
            self.join(name, keying)
        self.connect(READY)

    def join(self, name: str, keying: Keying = KEYING, start: int = 1) -> Member:
        one = replace(instance(name, start, length=100_000), keying=keying, total_blocks=10_000)
        self.members[name] = self.cluster.join(one)[0]
        return self.members[name]

    def connect(self, pair: Pair, contexts: str = "c") -> None:
        for member in self.members.values():
            if member.role is Role.GENERATION:
                self.cluster.announced(member, self.cluster.peers(member))
                for name, context in self.members.items():
                    if name.startswith(contexts) and context.role is Role.CONTEXT:
                        assert self.cluster.report(member, context.instance.start, pair)

    def caches(self, name: str, prompt: bytes, keying: Keying = KEYING) -> None:
        data = b"".join(chain(keying.root(b""), prompt, keying.tokens_per_block))
        self.cluster.index.store(self.members[name].number, data)

    def choose(self, prompt: bytes = b"\1" * 4000, keyings: tuple[Keying, ...] = (KEYING,), **more: Any) -> Choice:
        self.number += 1
        keys = {one.keying_id: b"".join(chain(one.root(b""), prompt, one.tokens_per_block)) for one in keyings}
        question = Question(RequestKey(MIN_GLOBAL_ID + self.number, 0), "m", len(prompt) // 4, 100, keys, **more)
        return self.cluster.select(1, question)

    def finish(self) -> None:
        self.cluster.finish(1, RequestKey(MIN_GLOBAL_ID + self.number, 0))

    def names(self, **more: Any) -> tuple[str | None, str]:
        placement = self.choose(**more).placement
        return placement.context and placement.context.instance_id, placement.generation.instance_id


CLUSTER = ("c0", "c1", "c2", "g0", "g1", "g2")


@pytest.mark.parametrize("policy", [Policy.LEAST_LOAD, Policy.KV_AWARE])
def test_load_goes_to_those_who_have_least(policy: Policy):
    world = World(policy, *CLUSTER)
    placed = [world.names() for _ in range(12)]
    assert set(Counter(context for context, _ in placed).values()) == {4}
    assert set(Counter(generation for _, generation in placed).values()) == {4}


def test_equal_instances_take_turns_when_requests_come_one_by_one():
    world = World(Policy.LEAST_LOAD, *CLUSTER, weights=Weights(balance=0))
    seen: Counter[str | None] = Counter()
    for _ in range(9):
        seen[world.names()[0]] += 1
        world.finish()
    assert set(seen.values()) == {3}


def test_the_computed_part_of_the_load_ends_before_the_request_does():
    world = World(Policy.LEAST_LOAD, "c0", "c1", "g0", weights=Weights(balance=0))
    assert world.names(prompt=b"\1" * 40_000) == ("c0", "g0")
    assert [world.names()[0] for _ in range(3)] == ["c1"] * 3
    assert world.cluster.prefilled(1, RequestKey(MIN_GLOBAL_ID + 1, 0))
    assert world.names()[0] == "c0"


@pytest.mark.parametrize(
    "full",
    [
        Load(used_blocks=9_999, total_blocks=10_000),
        # Little is used, but what is free is kept for the answers that it decodes.
        Load(used_blocks=10, total_blocks=10_000, receive_credits=1),
    ],
)
def test_a_generation_instance_without_room_is_the_last_choice(full: Load):
    world = World(Policy.LEAST_LOAD, "c0", "g0", "g1")
    world.cluster.set_load(world.members["g0"], full)
    assert [world.names()[1] for _ in range(5)] == ["g1"] * 5


def test_a_prompt_goes_where_it_is_cached():
    world = World(Policy.KV_AWARE, *CLUSTER)
    prompt = bytes(range(256)) * 16
    world.caches("c2", prompt)
    world.caches("c1", prompt[:1024])
    choice = world.choose(prompt)
    assert choice.placement.context is not None
    assert choice.placement.context.instance_id == "c2"
    # The last token is always computed.
    assert choice.context_cached == len(prompt) // 4 - 1
    assert choice.pick.reuse == choice.context_cached


def test_waiting_work_outweighs_what_is_cached():
    world = World(Policy.KV_AWARE, *CLUSTER)
    prompt = bytes(range(256)) * 16
    world.caches("c2", prompt)
    other = b"\7" * 40_000
    world.caches("c2", other[: len(other) - 8 * len(prompt)])
    assert world.names(prompt=other)[0] == "c2"
    assert world.names(prompt=prompt)[0] != "c2"


def test_instances_with_other_block_sizes_are_asked_by_their_own_keys():
    world = World(Policy.KV_AWARE, "c0", "c1", "g0")
    world.cluster.leave(world.members["c1"])
    world.join("c1", WIDE)
    world.connect(READY)
    prompt = bytes(range(256)) * 16
    world.caches("c1", prompt, WIDE)
    assert {one.tokens_per_block for served in world.cluster.served() for one in served.keyings} == {16, 64}
    assert world.names(prompt=prompt, keyings=(KEYING, WIDE))[0] == "c1"


def test_what_another_tenant_has_is_not_seen():
    world = World(Policy.KV_AWARE, "c0", "c1", "g0")
    prompt = bytes(range(256)) * 16
    data = b"".join(chain(KEYING.root(b"tenant"), prompt, 16))
    world.cluster.index.store(world.members["c1"].number, data)
    assert world.choose(prompt).context_cached == 0


def test_an_instance_that_is_gone_has_nothing_cached():
    world = World(Policy.KV_AWARE, "c0", "c1", "g0")
    prompt = bytes(range(256)) * 16
    world.caches("c1", prompt)
    world.cluster.leave(world.members["c1"])
    assert len(world.cluster.index) == 0
    world.join("c1")
    world.connect(READY)
    assert world.choose(prompt).context_cached == 0


def test_slow_paths_are_avoided_and_what_is_cached_there_need_not_move():
    world = World(Policy.KV_AWARE, "c0", "g0", "g1")
    report = world.cluster.report
    slow, fast = Estimate(0.5, 1e-3), Estimate(0.001, 1e-6)
    start = world.members["c0"].instance.start
    assert report(world.members["g0"], start, replace(READY, estimate=slow))
    assert report(world.members["g1"], start, replace(READY, estimate=fast))
    choice = world.choose()
    assert choice.placement.generation.instance_id == "g1"
    assert choice.transfer_s == pytest.approx(0.001 + 1000 * 1e-6)
    prompt = bytes(range(256)) * 16
    assert report(world.members["g0"], start, replace(READY, estimate=replace(slow, fixed_s=0.0)))
    world.caches("g0", prompt)
    for _ in range(20):
        world.choose()  # load on g1
    assert world.choose(prompt).generation_cached in (0, 1023)


def test_what_a_context_instance_measured_counts_and_unknown_pairs_are_average_ones():
    world = World(Policy.KV_AWARE, "c0", "g0", "g1", "g2")
    context, starts = world.members["c0"], {name: one.instance.start for name, one in world.members.items()}
    world.cluster.estimate(context, starts["g0"], Estimate(0.5, 0.0))
    world.cluster.estimate(context, starts["g1"], Estimate(0.1, 0.0))
    world.cluster.estimate(context, Start("g9", b"9" * 16), Estimate(0.0, 0.0))  # not here yet
    choice = world.choose()
    assert choice.placement.generation.instance_id == "g1"
    assert choice.transfer_s == pytest.approx(0.1)
    only = {one.generation_id: one.pair.estimate for one in world.cluster.pairs()}
    assert only == {"g0": Estimate(0.5, 0.0), "g1": Estimate(0.1, 0.0), "g2": None}
    # The generation instance's own word comes first: 0.5 s, 0.9 s, and the mean of the two for g2.
    assert world.cluster.report(world.members["g1"], starts["c0"], replace(READY, estimate=Estimate(0.9, 0.0)))
    assert world.choose().placement.generation.instance_id == "g0"
    # A new start was never measured.
    world.cluster.leave(world.members["g0"])
    world.join("g0", start=2)
    world.connect(READY)
    assert next(one.pair.estimate for one in world.cluster.pairs() if one.generation_id == "g0") is None
    with pytest.raises(InvalidRequest, match="only context instances"):
        world.cluster.estimate(world.members["g1"], starts["c0"], Estimate(0.1, 0.0))


def test_the_cheapest_pair_is_found_among_many():
    names = [*(f"c{at}" for at in range(20)), *(f"g{at}" for at in range(20))]
    world = World(Policy.KV_AWARE, *names)
    for at, context in enumerate(names[:20]):
        for other, generation in enumerate(names[20:]):
            cost = Estimate(0.0 if (at, other) == (17, 13) else 0.2, 0.0)
            start = world.members[context].instance.start
            world.cluster.report(world.members[generation], start, replace(READY, estimate=cost))
    assert world.names() == ("c17", "g13")


def test_pairs_that_are_not_ready_are_not_used_however_good():
    world = World(Policy.KV_AWARE, "c0", "c1", "g0", "g1")
    prompt = bytes(range(256)) * 16
    world.caches("c0", prompt)
    start = world.members["c0"].instance.start
    for name in ("g0", "g1"):
        world.cluster.report(world.members[name], start, Pair(PairState.INCOMPATIBLE))
    assert world.names(prompt=prompt)[0] == "c1"
    world.cluster.report(world.members["g1"], start, READY)
    assert world.names(prompt=prompt) == ("c0", "g1")


def test_a_conversation_stays_where_it_is():
    world = World(Policy.AFFINITY, *CLUSTER)
    places = {talk: world.names(affinity=bytes([talk]) * 16) for talk in range(40)}
    assert len(set(places.values())) > 4
    for talk, place in places.items():
        world.finish()
        assert world.names(affinity=bytes([talk]) * 16) == place
    # A restarted coordinator places it alike, whatever the order of arrival of its instances.
    again = World(Policy.AFFINITY, *reversed(CLUSTER))
    assert {talk: again.names(affinity=bytes([talk]) * 16) for talk in range(40)} == places


@pytest.mark.parametrize("gone", ["left", "overloaded", "excluded"])
def test_a_conversation_moves_away_from_a_bad_place_and_comes_back(gone: str):
    world = World(Policy.AFFINITY, *CLUSTER, weights=Weights(slack_tokens=100))
    context, _ = world.names(affinity=b"x" * 16)
    world.finish()
    assert context is not None
    excluded: frozenset[bytes] = frozenset()
    if gone == "left":
        world.cluster.leave(world.members[context])
    elif gone == "excluded":
        excluded = frozenset({world.members[context].instance.incarnation})
    else:
        world.choose(b"\1" * 40_000, affinity=b"x" * 16)
    if gone != "excluded":
        assert world.names(affinity=b"x" * 16, prompt=b"\1" * 400)[0] != context
    else:
        with pytest.raises(NoCapacity):  # every instance of these tests has that incarnation
            world.names(affinity=b"x" * 16, excluded=excluded)


def test_excluded_instances_get_nothing():
    world = World(Policy.ROUND_ROBIN, "c0", "g0")
    other = replace(instance("c1", 2, length=100_000), keying=KEYING)
    world.members["c1"] = world.cluster.join(other)[0]
    world.connect(READY)
    for _ in range(4):
        assert world.names(excluded=frozenset({other.incarnation}))[0] == "c0"


def test_kinds_of_placement_can_be_asked_for():
    world = World(Policy.LEAST_LOAD, "c0", "g0", "w0")
    assert [world.choose(kinds=frozenset({Kind.UNSPLIT})).pick.kind for _ in range(3)] == [Kind.UNSPLIT] * 3
    assert [world.choose(kinds=frozenset({Kind.SPLIT})).pick.kind for _ in range(3)] == [Kind.SPLIT] * 3


def test_a_generation_instance_computes_short_uncached_prompts_itself():
    world = World(Policy.KV_AWARE, "c0", "g0", "g1")
    prompt = bytes(range(256)) * 16
    assert world.choose(prompt, local_tokens=100).pick.kind is Kind.SPLIT
    world.caches("g1", prompt[:-256])
    choice = world.choose(prompt, local_tokens=100)
    assert choice.pick.kind is Kind.LOCAL_PREFILL
    assert choice.placement.context is None
    assert choice.placement.generation.instance_id == "g1"
    assert [leg.prefill for leg in choice.legs] == [64]
    assert world.choose(b"\1" * 200, local_tokens=100).pick.kind is Kind.LOCAL_PREFILL
    assert world.choose(prompt).pick.kind is Kind.SPLIT
