"""Who holds which placement, what is refused and with which reason."""

from __future__ import annotations

import pytest
from isthmus.v1 import errors_pb2

from cluster_world import World, key
from coord_support import instance
from isthmus_coordinator.load import LegLoad
from isthmus_coordinator.membership import Load
from isthmus_coordinator.pairs import Incompatibility, Pair, PairState
from isthmus_coordinator.placement import Question
from isthmus_core.errors import DuplicateRequest, InvalidRequest, NoCapacity, UnknownModel


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
