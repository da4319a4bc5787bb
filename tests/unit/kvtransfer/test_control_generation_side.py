"""The peer machine of a generation instance at every point of a stream's life, without any stream."""

from __future__ import annotations

import dataclasses
import os

import pytest

from kvtransfer.control.generation import PairState, PeerAddress
from kvtransfer.errors import ProtocolError
from kvtransfer.messages import (
    Cancel,
    Ping,
    Pong,
    Reject,
)
from kvtransfer.ports import Incompatibility, RequestKey
from kvtransfer.session.actions import EndReason
from peer_sides import ADDRESS, CONTEXT, PEER, GenerationSide


@pytest.fixture
def generation() -> GenerationSide:
    return GenerationSide()


def states(side: GenerationSide) -> list[PairState]:
    return [pair.state for pair in side.control.pairs()]


def test_pair_is_ready_after_welcome(generation: GenerationSide):
    assert states(generation) == [PairState.CONNECTING]
    assert generation.control.speaks_to(PEER) == b""
    generation.ready()
    assert states(generation) == [PairState.READY]
    assert generation.control.speaks_to(PEER) == CONTEXT.incarnation
    generation.control.closed(PEER, 2.0)
    assert states(generation) == [PairState.CONNECTING]
    assert generation.pairs == [PairState.CONNECTING, PairState.READY, PairState.CONNECTING]


def test_every_stream_has_a_higher_epoch(generation: GenerationSide):
    epochs = []
    for _ in range(3):
        epochs.append(generation.greet().connection_epoch)
        generation.control.closed(PEER, 1.0)
    assert epochs == sorted(set(epochs))


def test_reject_is_kept_from_this_sides_view_until_a_welcome_fits(generation: GenerationSide):
    said = generation.greet()
    generation.tell(Reject((Incompatibility("f", "theirs", "ours", "do"),)))
    (pair,) = generation.control.pairs()
    assert pair.state is PairState.INCOMPATIBLE
    assert (pair.incompatibilities[0].mine, pair.incompatibilities[0].yours) == ("ours", "theirs")
    assert generation.ended == [(PEER, EndReason.REJECTED)]
    again = generation.greet()
    assert again.connection_epoch > said.connection_epoch
    assert states(generation) == [PairState.INCOMPATIBLE]
    generation.welcome(again)
    assert states(generation) == [PairState.READY]


def test_other_plan_is_refused_with_a_reject(generation: GenerationSide):
    generation.welcome(generation.greet(), plan_digest=b"other")
    assert generation.kinds() == ["Reject"]
    (pair,) = generation.control.pairs()
    assert [reason.field for reason in pair.incompatibilities] == ["plan_digest"]


def test_welcome_must_answer_this_stream(generation: GenerationSide):
    said = generation.greet()
    with pytest.raises(ProtocolError, match="answers stream"):
        generation.welcome(said, connection_epoch=said.connection_epoch + 1)


def test_incarnations_of_envelopes_are_checked(generation: GenerationSide):
    generation.ready()
    generation.tell(Ping(4))
    assert generation.said == [(PEER, Pong(4))]
    for wrong in ({"src": b"x" * 16}, {"dst": b"x" * 16}):
        with pytest.raises(ProtocolError, match="another incarnation"):
            generation.tell(Ping(4), **wrong)
    with pytest.raises(ProtocolError, match="not for a generation"):
        generation.tell(Cancel(RequestKey(1 << 40)))


def test_endpoint_with_another_incarnation_is_left_alone(generation: GenerationSide):
    successor = dataclasses.replace(CONTEXT, incarnation=os.urandom(16), exited_incarnations=(CONTEXT.incarnation,))
    generation.welcome(generation.greet(), info=successor)
    assert generation.ended == [(PEER, EndReason.UNNEEDED)]
    assert generation.stopped == [PEER]
    assert states(generation) == [PairState.CONNECTING]
    address = PeerAddress("c", successor.incarnation, "c:1")
    generation.control.set_peers([address], 2.0)
    assert generation.started == [ADDRESS, address]
    assert [pair.incarnation for pair in generation.control.pairs()] == [successor.incarnation]
    assert generation.stopped == [PEER]


def test_list_of_peers_replaces(generation: GenerationSide):
    generation.ready()
    generation.control.set_peers([ADDRESS], 2.0)
    assert (len(generation.started), generation.stopped) == (1, [])
    moved = dataclasses.replace(ADDRESS, endpoint="c:2")
    generation.control.set_peers([moved], 2.0)
    assert (generation.started[-1], generation.stopped) == (moved, [PEER])
    assert states(generation) == [PairState.CONNECTING]
    generation.control.set_peers([], 3.0)
    assert generation.control.pairs() == []
    assert generation.stopped == [PEER, PEER]


def test_silent_stream_is_opened_again_and_the_peer_is_not_dead(generation: GenerationSide):
    generation.ready()
    for tenth in range(10, 70):
        generation.core.tick(tenth / 10)
    assert generation.kinds() == ["Ping"] * 3
    assert generation.ended == [(PEER, EndReason.SILENT)]
    assert states(generation) == [PairState.CONNECTING]
    generation.ready()
