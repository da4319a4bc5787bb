"""What the two peer machines make of exits, fences and goodbyes, and what they show of each other."""

from __future__ import annotations

import dataclasses

import pytest

from kvtransfer.control.generation import PeerAddress
from kvtransfer.control.negotiation import limits_of
from kvtransfer.messages import (
    Capability,
    ExitReport,
    FenceWriter,
    Goodbye,
    ReceiveKey,
)
from kvtransfer.ports import Incompatibility, PeerLoaded, RequestKey
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.actions import EndReason, Fence, StopInstance
from peer_sides import ADDRESS, CONFIG, CONTEXT, GENERATION, PEER, ContextSide, GenerationSide, make


@pytest.fixture
def context() -> ContextSide:
    return ContextSide()


@pytest.fixture
def generation() -> GenerationSide:
    return GenerationSide()


def test_exit_of_a_rank_is_told_to_every_peer(context: ContextSide):
    context.ready()
    context.core.rank_exited(1, "signal 9", 3.0)
    assert context.said == [(1, ExitReport((1,), "signal 9"))]
    context.said.clear()
    # And to one that comes later: its pages may wait for the proof.
    context.hello(stream=2, epoch=2)
    assert context.said == [(2, ExitReport((1,), "signal 9"))]
    assert context.ended[-1] == (2, EndReason.UNAVAILABLE)


def test_fence_is_answered_with_what_is_known(context: ContextSide):
    context.ready()
    context.tell(FenceWriter((ReceiveKey(RequestKey(1 << 40), 1),), "silent"))
    assert context.kinds() == ["TransferNotice"] * 2
    context.core.rank_exited(0, "signal 9", 3.0)
    context.kinds()
    context.tell(FenceWriter((), "silent"))
    assert context.kinds() == ["ExitReport"]


def test_fence_without_a_stream_proves_what_it_can(context: ContextSide):
    fence = FenceWriter((ReceiveKey(RequestKey(1 << 40), 1),), "silent")
    answer = context.core.fence_asked(CONTEXT.incarnation, ("g", GENERATION.incarnation), fence)
    assert (answer.incarnation, answer.exited_ranks) == (CONTEXT.incarnation, ())
    context.core.rank_exited(1, "signal 9", 3.0)
    answer = context.core.fence_asked(b"x" * 16, ("g", GENERATION.incarnation), fence)
    assert (answer.exited_ranks, answer.notices) == ((1,), ())


def test_goodbye_goes_to_ready_streams_only(context: ContextSide, generation: GenerationSide):
    context.ready()
    context.hello(stream=2, epoch=1, info=make(InstanceRole.GENERATION, "h", 2, incarnation=b"h" * 16))
    context.core.goodbye("stopping")
    assert context.said == [(1, Goodbye("stopping"))]
    generation.ready()
    generation.core.goodbye("stopping")
    assert generation.said[-1] == (PEER, Goodbye("stopping"))


def test_fence_goes_over_the_stream_or_by_a_call(generation: GenerationSide):
    receives = (ReceiveKey(RequestKey(1 << 40), 1),)
    generation.core._emit(Fence(PEER, "c:1", receives, "silent"))
    assert generation.fences == [(PEER, "c:1", FenceWriter(receives, "silent"))]
    generation.ready()
    generation.said.clear()
    generation.core._emit(Fence(PEER, "c:1", receives, "silent"))
    assert generation.said == [(PEER, FenceWriter(receives, "silent"))]
    generation.core._emit(StopInstance("too much"))
    assert generation.stops == ["too much"]


def test_passing_reasons_of_a_rank_are_no_incompatibility(context: ContextSide):
    context.hello()
    context.load(0)
    context.kinds()
    busy = PeerLoaded(
        "g", GENERATION.incarnation, (Incompatibility("ranks[1].agent", "a", "busy", "wait"),), later=True
    )
    context.control.rank_loaded(1, busy, 1.0)
    assert context.kinds() == []
    assert context.ended == [(1, EndReason.UNAVAILABLE)]


def test_exit_report_of_a_successor_says_nothing_about_this_peer(generation: GenerationSide):
    generation.greet()
    generation.tell(ExitReport((0,), "signal 9"), src=b"s" * 16)
    assert generation.ended == []


def test_at_most_so_many_streams_and_those_in_use_stay(generation: GenerationSide, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation.control, "_config", dataclasses.replace(CONFIG, max_peers=2))
    more = [PeerAddress(name, name.encode() * 16, f"{name}:1") for name in "xyz"]
    used = {("z", b"z" * 16): 5.0, PEER: 3.0}
    monkeypatch.setattr(generation.core.receive, "last_used", lambda peer: used.get(peer, float("-inf")))
    generation.control.set_peers([*more, ADDRESS], 1.0)
    assert {pair.instance_id for pair in generation.control.pairs()} == {"z", "c"}
    used[("x", b"x" * 16)] = 9.0
    generation.control.set_peers([*more, ADDRESS], 2.0)
    assert {pair.instance_id for pair in generation.control.pairs()} == {"x", "z"}
    assert generation.stopped == [PEER]


def test_effective_values_are_shown_on_both_sides(context: ContextSide, generation: GenerationSide):
    assert context.core.peers() == generation.core.peers() == []
    context.ready()
    generation.ready()
    (theirs,), (ours,) = context.core.peers(), generation.core.peers()
    assert (theirs.instance_id, ours.instance_id) == ("g", "c")
    assert theirs.limits == ours.limits == limits_of(CONFIG)
    assert theirs.capabilities == ours.capabilities == frozenset(Capability)
