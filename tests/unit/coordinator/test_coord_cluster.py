"""Members, pairs and placement as values: who may be used, in which order, and why nobody can be."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster_world import READY, World
from coord_support import instance
from isthmus_coordinator.membership import InstanceReplaced, StreamReplaced
from isthmus_coordinator.pairs import Pair, PairState
from isthmus_core.errors import InvalidRequest, NoCapacity


@pytest.mark.parametrize(("contexts", "generations"), [(1, 1), (2, 2), (3, 2), (2, 5)])
def test_every_ready_pair_gets_its_turn_and_neighbours_differ(contexts: int, generations: int):
    names = [f"c{i}" for i in range(contexts)] + [f"g{i}" for i in range(generations)]
    world = World(*names)
    pairs = contexts * generations
    chosen = [world.place(number) for number in range(2 * pairs)]
    assert Counter(chosen) == {(f"c{i}", f"g{j}"): 2 for i in range(contexts) for j in range(generations)}
    for i in range(min(contexts, generations) - 1):
        assert chosen[i][0] != chosen[i + 1][0]
        assert chosen[i][1] != chosen[i + 1][1]


def test_an_instance_that_does_everything_is_a_placement_of_its_own():
    world = World("c0", "g0", "w0")
    assert {world.place(0), world.place(1)} == {("c0", "g0"), (None, "w0")}
    assert world.open() == {"c0": 1, "g0": 1, "w0": 1}


def test_pairs_that_are_not_ready_are_never_used():
    world = World("c0", "c1", "g0", ready=False)
    c0, c1, g0 = (world.members[name] for name in ("c0", "c1", "g0"))
    world.cluster.announced(g0, world.cluster.peers(g0))
    world.cluster.report(g0, c0.instance.start, READY)
    world.cluster.report(g0, c1.instance.start, Pair(PairState.INCOMPATIBLE))
    assert {world.place(number) for number in range(4)} == {("c0", "g0")}
    world.cluster.report(g0, c0.instance.start, Pair(PairState.CONNECTING))
    with pytest.raises(NoCapacity):
        world.place(9)


@pytest.mark.parametrize("name", ["c0", "g0", "w0"])
def test_a_draining_instance_gets_nothing_new(name: str):
    world = World("c0", "c1", "g0", "g1", "w0", "w1")
    world.cluster.set_draining(world.members[name])
    for number in range(12):
        assert name not in world.place(number)


def test_a_draining_context_instance_stays_a_peer():
    world = World("c0", "g0")
    world.cluster.set_draining(world.members["c0"])
    assert [peer.instance_id for peer in world.cluster.peers(world.members["g0"])] == ["c0"]


def test_peers_are_the_context_instances_of_the_same_model():
    world = World("c0", "c1", "g0", "w0")
    world.join(instance("c9", model="other"))
    assert [peer.instance_id for peer in world.cluster.peers(world.members["g0"])] == ["c0", "c1"]
    assert not world.cluster.peers(world.members["c0"])
    assert not world.cluster.peers(world.members["w0"])


def test_a_new_start_of_a_context_instance_is_not_used_on_the_word_about_the_old_one():
    world = World("c0", "g0")
    world.join(instance("c0", 2))
    with pytest.raises(NoCapacity, match="not connected yet"):
        world.place(0)
    old = instance("c0", 1).start
    g0 = world.members["g0"]
    world.cluster.announced(g0, world.cluster.peers(g0))
    assert not world.cluster.report(g0, old, READY)
    with pytest.raises(NoCapacity):
        world.place(0)
    assert world.cluster.report(g0, instance("c0", 2).start, READY)
    assert world.place(0) == ("c0", "g0")


def test_a_context_instance_that_was_away_unnoticed_is_usable_again():
    world = World("c0", "g0")
    world.cluster.leave(world.members["c0"])
    with pytest.raises(NoCapacity):
        world.place(0)
    world.join(instance("c0"))
    assert world.place(0) == ("c0", "g0")


def test_a_peer_that_was_taken_off_the_list_must_be_reported_again():
    world = World("c0", "g0")
    g0 = world.members["g0"]
    world.cluster.leave(world.members["c0"])
    world.cluster.announced(g0, world.cluster.peers(g0))
    world.join(instance("c0"))
    world.cluster.announced(g0, world.cluster.peers(g0))
    with pytest.raises(NoCapacity, match="not connected yet"):
        world.place(0)


def test_reports_before_the_first_list_count_once_the_context_instance_is_back():
    world = World("g0", ready=False)
    assert world.cluster.report(world.members["g0"], instance("c0").start, READY)
    with pytest.raises(NoCapacity):
        world.place(0)
    world.join(instance("c0"))
    assert world.place(0) == ("c0", "g0")


def test_reports_end_with_the_stream_that_brought_them():
    world = World("c0", "g0")
    old = world.members["g0"]
    world.join(instance("g0"))
    with pytest.raises(NoCapacity):
        world.place(0)
    assert not world.cluster.report(old, instance("c0").start, READY)
    world.cluster.announced(old, world.cluster.peers(old))  # a list that was being written
    with pytest.raises(NoCapacity):
        world.place(0)


def test_only_generation_instances_report():
    world = World("c0", "c1")
    with pytest.raises(InvalidRequest, match="generation"):
        world.cluster.report(world.members["c0"], instance("c1").start, READY)


def test_a_new_start_replaces_the_old_one_which_never_comes_back():
    world = World()
    first, replaced = world.cluster.join(instance("w0", 1))
    assert replaced is None
    _, replaced = world.cluster.join(instance("w0", 2))
    assert replaced is not None
    assert replaced[0] is first
    assert isinstance(replaced[1], InstanceReplaced)
    assert not world.cluster.leave(first)
    assert world.place(0) == (None, "w0")
    with pytest.raises(InstanceReplaced):
        world.cluster.join(instance("w0", 1))
    assert world.cluster.members()[0].instance.incarnation == instance("w0", 2).incarnation


def test_a_second_stream_of_the_same_start_takes_over_quietly():
    world = World("w0")
    again, replaced = world.cluster.join(instance("w0"))
    assert replaced is not None
    assert isinstance(replaced[1], StreamReplaced)
    assert not world.cluster.leave(world.members["w0"])
    assert world.place(0) == (None, "w0")
    assert world.cluster.leave(again)
    assert not world.cluster.members()


def test_a_start_that_was_replaced_while_away_does_not_push_its_successor_out():
    world = World()
    old, _ = world.cluster.join(instance("w0", 1))
    world.cluster.leave(old)
    world.cluster.join(instance("w0", 2))
    with pytest.raises(InstanceReplaced):
        world.cluster.join(instance("w0", 1))
