"""Members, pairs and placement as values: who may be used, in which order, and why nobody can be."""

from __future__ import annotations

from collections import Counter

import pytest
from isthmus.v1 import errors_pb2

from coord_support import instance
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.load import LegLoad
from isthmus_coordinator.membership import Instance, InstanceReplaced, Load, Member, StreamReplaced
from isthmus_coordinator.pairs import Incompatibility, Pair, PairState
from isthmus_coordinator.placement import Question
from isthmus_core.errors import DuplicateRequest, InvalidRequest, NoCapacity, UnknownModel
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey

READY = Pair(PairState.READY)


def key(number: int, attempt: int = 0) -> RequestKey:
    return RequestKey(MIN_GLOBAL_ID + number, attempt)


class World:
    """A cluster whose generation instances hear of their peers and report them ready at once."""

    def __init__(self, *names: str, ready: bool = True) -> None:
        self.cluster = Cluster()
        self.members: dict[str, Member] = {}
        for name in names:
            self.join(instance(name))
        if ready:
            self.connect()

    def join(self, one: Instance) -> Member:
        self.members[one.instance_id], _ = self.cluster.join(one)
        return self.members[one.instance_id]

    def connect(self) -> None:
        for member in self.members.values():
            peers = self.cluster.peers(member)
            if member.instance.role.name == "GENERATION":
                self.cluster.announced(member, peers)
            for peer in peers:
                assert self.cluster.report(member, peer.start, READY)

    def place(self, number: int, router: int = 1, model: str = "m") -> tuple[str | None, str]:
        placement = self.cluster.select(router, Question(key(number), model, 3, 3)).placement
        return placement.context and placement.context.instance_id, placement.generation.instance_id

    def select(self, number: int, prompt: int, output: int) -> str:
        question = Question(key(number), "m", prompt, output)
        return self.cluster.select(1, question).placement.generation.instance_id

    def open(self) -> dict[str, int]:
        return {view.instance.instance_id: view.open_requests for view in self.cluster.members() if view.open_requests}


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


def test_live_duplicates_are_refused_whatever_the_router_and_attempt():
    world = World("w0")
    world.place(0, router=1)
    for router, attempt in ((1, 0), (2, 0), (1, 1), (2, 5)):
        with pytest.raises(DuplicateRequest):
            world.cluster.select(router, Question(key(0, attempt), "m", 1, 1))
    assert world.open() == {"w0": 1}


def test_the_next_attempt_is_legal_once_the_last_is_finished():
    world = World("w0")
    world.place(0)
    assert world.cluster.finish(1, key(0))
    world.cluster.select(1, Question(key(0, 1), "m", 1, 1))
    assert not world.cluster.finish(1, key(0, 0))
    assert world.open() == {"w0": 1}
    assert world.cluster.finish(1, key(0, 1))
    assert world.open() == {}


def test_only_the_holder_finishes():
    world = World("w0")
    world.place(0, router=1)
    assert not world.cluster.finish(2, key(0))
    assert world.open() == {"w0": 1}


def test_a_routers_end_releases_its_placements_and_no_others():
    world = World("c0", "g0")
    for number in range(6):
        world.place(number, router=number % 2)
    assert world.cluster.drop_router(0) == 3
    assert world.open() == {"c0": 3, "g0": 3}
    assert world.cluster.drop_router(1) == 3
    assert world.open() == {}
    assert world.cluster.open_requests() == 0


def test_load_follows_the_start_of_an_instance():
    world = World("w0")
    world.place(0)
    world.cluster.leave(world.members["w0"])
    assert world.open() == {}
    world.join(instance("w0", 1))
    assert world.open() == {"w0": 1}  # the same start: its request still runs
    world.join(instance("w0", 2))
    assert world.open() == {}
    assert world.cluster.finish(1, key(0))
    assert world.open() == {}
    assert world.cluster.open_requests() == 0


def test_a_reconnected_router_names_what_it_holds():
    world = World("w0", "w1")
    w0 = LegLoad(instance("w0").start, 3, 6)
    world.place(0, router=1)
    world.cluster.adopt(2, [(key(0), (w0,)), (key(1), (w0,))])  # 1 is what is left of its broken stream
    assert world.cluster.drop_router(1) == 0
    assert world.open() == {"w0": 2}
    with pytest.raises(DuplicateRequest):
        world.place(1)
    assert world.cluster.finish(2, key(0))
    assert world.cluster.drop_router(2) == 1
    assert world.open() == {}


def test_unknown_models_name_the_known_ones():
    world = World("w0")
    world.join(instance("w1", model="b"))
    with pytest.raises(UnknownModel) as caught:
        world.place(0, model="x")
    assert caught.value.detail == errors_pb2.UnknownModel(model="x", known=["b", "m"])


def test_an_empty_cluster_is_no_reason_to_call_a_model_unknown():
    with pytest.raises(NoCapacity, match="no instance has registered"):
        World().place(0)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("c0", "c1"), "2 context instances, 0 generation instances"),
        (("g0",), "0 context instances, 1 generation instance"),
        (("c0", "g0"), "c0 and g0 are not connected yet"),
    ],
)
def test_the_reason_for_no_capacity_is_told(names: tuple[str, ...], reason: str):
    with pytest.raises(NoCapacity, match=reason) as caught:
        World(*names, ready=False).place(0)
    assert isinstance(caught.value.detail, errors_pb2.NoCapacity)


def test_draining_and_incompatibility_are_reasons_too():
    world = World("c0", "g0", "w0", ready=False)
    world.cluster.set_draining(world.members["w0"])
    reasons = (Incompatibility("model.weights", "aa", "bb", "use one checkpoint"),)
    g0 = world.members["g0"]
    world.cluster.report(g0, instance("c0").start, Pair(PairState.INCOMPATIBLE, reasons))
    with pytest.raises(NoCapacity) as caught:
        world.place(0)
    assert "c0 and g0 are incompatible: model.weights aa against bb" in caught.value.message
    assert "1 context_and_generation instance (1 draining)" in caught.value.message


def test_a_refusal_names_a_few_pairs_of_a_large_cluster():
    world = World(*(f"c{i}" for i in range(10)), *(f"g{i}" for i in range(10)), ready=False)
    with pytest.raises(NoCapacity, match="and 95 more pairs"):
        world.place(0)


def test_requests_go_where_they_fit():
    world = World()
    world.join(instance("w0", length=10))
    world.join(instance("w1", length=50))
    placed = {world.select(number, 5, 6) for number in range(4)}
    assert placed == {"w1"}
    with pytest.raises(InvalidRequest, match="at most 50 tokens"):
        world.select(9, 50, 1)
    assert world.cluster.open_requests() == 4


def test_served_models_and_the_length_that_every_placement_takes():
    world = World("c0")
    assert world.cluster.served() == ()
    world.join(instance("g0", length=70))
    world.join(instance("w0", model="b", length=20))
    world.connect()
    assert [(one.name, one.max_model_len) for one in world.cluster.served()] == [("b", 20), ("m", 70)]
    world.cluster.set_draining(world.members["g0"])
    assert [one.name for one in world.cluster.served()] == ["b"]


def test_views_show_loads_and_every_pair_of_a_model():
    world = World("c0", "g0", "w0", ready=False)
    world.join(instance("c9", model="other"))
    world.cluster.set_load(world.members["w0"], Load(running_requests=3))
    assert [(view.context_id, view.generation_id, view.pair.state) for view in world.cluster.pairs()] == [
        ("c0", "g0", PairState.CONNECTING)
    ]
    loads = {view.instance.instance_id: view.load.running_requests for view in world.cluster.members()}
    assert loads == {"c0": 0, "c9": 0, "g0": 0, "w0": 3}
