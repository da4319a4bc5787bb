"""The peer machine of a context instance at every point of a stream's life, without any stream."""

from __future__ import annotations

import dataclasses
import os

import pytest

from kvtransfer.control.context import FORGET_AFTER_S
from kvtransfer.control.negotiation import Dialect, limits_of, make_hello
from kvtransfer.errors import ProtocolError
from kvtransfer.messages import (
    Cancel,
    Envelope,
    PeerBody,
    Ping,
    Pong,
    Reject,
    Welcome,
)
from kvtransfer.peer_plan import plan_digest
from kvtransfer.ports import ForgetPeer, Incompatibility, LoadPeer, RequestKey
from kvtransfer.session.actions import EndReason
from peer_sides import CONFIG, CONTEXT, GENERATION, ContextSide


@pytest.fixture
def context() -> ContextSide:
    return ContextSide()


def test_welcome_comes_after_every_rank_has_loaded_the_peer(context: ContextSide):
    context.hello()
    assert context.orders == [(rank, LoadPeer(GENERATION, CONTEXT.ranks, bounce=True)) for rank in (0, 1)]
    context.load(0)
    context.load(0)
    assert context.kinds() == []
    context.load(1)
    (_, said) = context.said[0]
    assert isinstance(said, Welcome)
    assert said.plan_digest == plan_digest(CONTEXT, GENERATION)
    assert context.control.stream_of(("g", GENERATION.incarnation)) == 1
    assert context.control.speaks_to(1) == GENERATION.incarnation


def test_reasons_of_all_ranks_are_told_together(context: ContextSide):
    context.hello()
    for rank in (0, 1):
        context.load(rank, problems=(Incompatibility(f"ranks[{rank}].agent", "a", "b", "c"),))
    (_, said) = context.said[0]
    assert isinstance(said, Reject)
    assert [one.field for one in said.incompatibilities] == ["ranks[0].agent", "ranks[1].agent"]
    assert context.ended == [(1, EndReason.REJECTED)]


@pytest.mark.parametrize("early", [Ping(1), Cancel(RequestKey(1 << 40))])
def test_nothing_is_taken_before_welcome(context: ContextSide, early: PeerBody):
    context.hello()
    with pytest.raises(ProtocolError, match="before Welcome"):
        context.tell(early)


def test_every_envelope_names_both_incarnations(context: ContextSide):
    context.ready()
    context.tell(Ping(5))
    assert context.said == [(1, Pong(5))]
    for wrong in ({"src": b"x" * 16}, {"dst": b"x" * 16}, {"dst": b""}):
        with pytest.raises(ProtocolError, match="incarnations"):
            context.tell(Ping(5), **wrong)


def test_pong_that_crosses_welcome_names_nobody(context: ContextSide):
    context.ready()
    context.tell(Pong(5), dst=b"")
    assert context.ended == []
    with pytest.raises(ProtocolError, match="incarnations"):
        context.tell(Pong(5), dst=b"x" * 16)


def test_hello_twice_or_for_somebody_else_is_refused(context: ContextSide):
    context.ready()
    said = make_hello(GENERATION, limits_of(CONFIG), 2, Dialect())
    with pytest.raises(ProtocolError, match="second Hello"):
        context.tell(said)
    context.control.opened(2, 0.0)
    with pytest.raises(ProtocolError, match="another incarnation"):
        context.control.envelope(2, Envelope(b"x" * 16, b"", (said,)), 0.0)


@pytest.mark.parametrize("body", [Welcome(1, frozenset(), limits_of(CONFIG), CONTEXT, b"", 1)])
def test_messages_for_the_other_side_are_refused(context: ContextSide, body: PeerBody):
    context.ready()
    with pytest.raises(ProtocolError, match="not for a context"):
        context.tell(body)


def test_newer_stream_replaces_and_older_one_does_not(context: ContextSide):
    context.ready(stream=1, epoch=1)
    context.ready(stream=2, epoch=2)
    assert context.ended == [(1, EndReason.REPLACED)]
    # What still comes on the old stream is from the past.
    context.tell(Ping(1), stream=1)
    assert context.kinds() == []
    context.hello(stream=3, epoch=2)
    assert context.ended[-1] == (3, EndReason.REPLACED)
    assert context.control.stream_of(("g", GENERATION.incarnation)) == 2


def test_peer_that_stays_away_is_unloaded(context: ContextSide):
    context.ready()
    context.control.closed(1, 10.0)
    context.orders.clear()
    context.core.tick(10.0 + FORGET_AFTER_S - 1)
    assert context.orders == []
    context.core.tick(10.0 + FORGET_AFTER_S)
    assert context.orders == [(rank, ForgetPeer("g", GENERATION.incarnation)) for rank in (0, 1)]


def test_predecessor_of_a_peer_is_unloaded(context: ContextSide):
    context.ready()
    context.control.closed(1, 10.0)
    successor = dataclasses.replace(GENERATION, incarnation=os.urandom(16))
    context.orders.clear()
    context.ready(stream=2, info=successor)
    assert context.orders[:2] == [(rank, ForgetPeer("g", GENERATION.incarnation)) for rank in (0, 1)]


def test_no_peer_is_loaded_when_a_rank_is_gone(context: ContextSide):
    context.hello()
    context.core.rank_exited(0, "signal 9", 1.0)
    assert context.ended == [(1, EndReason.UNAVAILABLE)]
    context.hello(stream=2, epoch=2)
    assert context.ended[-1] == (2, EndReason.UNAVAILABLE)


def test_silent_stream_is_ended(context: ContextSide):
    context.ready()
    for tenth in range(70):
        context.core.tick(tenth / 10)
    assert context.kinds() == ["Ping"] * 3
    assert context.ended == [(1, EndReason.SILENT)]
