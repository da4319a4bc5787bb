"""generation_first: intents without pages, bindings, first tokens over the stream, in every order and after a break."""

from __future__ import annotations

import pytest

from hub_world import key
from kvtransfer.config import TransferConfig
from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.messages import Bind, Cancel, FirstTokens, KvIntent, NotBound
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    Bound,
    FirstTokensArrived,
    ReceiveIntent,
    SendFirstTokens,
    TransferFailure,
)
from kvtransfer.session.actions import Action, ToScheduler
from kvtransfer.session.bindings import Bindings
from kvtransfer.session.intents import Intents
from session_sides import HOLDER, HOLDER_ID, OTHER, PEER, said

K = key(1)


class Waiting:
    """The generation side; the stream is ready unless said otherwise."""

    def __init__(self, ready: bool = True, speaks: bool = True) -> None:
        self.out: list[Action] = []
        self.intents = Intents(TransferConfig("loopback", timeout_s=10), self.out.append)
        if ready:
            self.intents.stream_ready(HOLDER_ID, speaks)

    def intend(self) -> list[Action]:
        self.intents.intend(ReceiveIntent(K, HOLDER), 0.0)
        return self.take()

    def take(self) -> list[Action]:
        out, self.out[:] = list(self.out), []
        return out


def told(actions: list[Action]) -> list[object]:
    return [one.message for one in actions if isinstance(one, ToScheduler)]


def test_intent_is_bound_once_and_ends_with_the_first_tokens():
    side = Waiting()
    assert said(side.intend()) == [KvIntent(K)]
    side.intents.bound(HOLDER_ID, K, 1)
    side.intents.bound(HOLDER_ID, K, 1)
    assert told(side.take()) == [Bound(K, 1)]
    with pytest.raises(ProtocolError, match="group 1 and then to 0"):
        side.intents.bound(HOLDER_ID, K, 0)
    side.intents.first_tokens(HOLDER_ID, K, b"first")
    side.intents.first_tokens(HOLDER_ID, K, b"again")
    assert told(side.take()) == [FirstTokensArrived(K, b"first")]
    assert side.intents.is_idle


def test_intent_is_said_again_on_a_new_stream_until_it_is_over():
    side = Waiting(ready=False)
    assert side.intend() == []
    side.intents.stream_ready(HOLDER_ID, True)
    assert said(side.take()) == [KvIntent(K)]
    side.intents.bound(HOLDER_ID, K, 0)
    side.take()
    side.intents.stream_broke(HOLDER_ID)
    side.intents.stream_ready(HOLDER_ID, True)
    assert said(side.take()) == [KvIntent(K)]
    side.intents.bound(HOLDER_ID, K, 0)
    assert side.take() == []


def test_first_tokens_that_overtake_a_lost_bind_wait_for_it():
    side = Waiting()
    side.intend()
    side.intents.first_tokens(HOLDER_ID, K, b"first")
    assert side.take() == []
    side.intents.bound(HOLDER_ID, K, 0)
    assert told(side.take()) == [Bound(K, 0), FirstTokensArrived(K, b"first")]
    assert side.intents.is_idle


def test_nobody_waits_for_ever():
    side = Waiting()
    side.intend()
    side.intents.tick(9.9)
    assert side.take() == []
    side.intents.tick(10.0)
    actions = side.take()
    assert said(actions) == [Cancel(K, 0)]
    (failed,) = told(actions)
    assert isinstance(failed, BindFailed)
    assert failed.failure is TransferFailure.TIMED_OUT


@pytest.mark.parametrize("end", ["not bound", "gone", "old peer"])
def test_an_intent_that_comes_to_nothing_says_why(end: str):
    side = Waiting(speaks=end != "old peer")
    actions = side.intend()
    match end:
        case "not bound":
            side.intents.not_bound(OTHER, K, "somebody else")
            assert side.take() == []
            side.intents.not_bound(HOLDER_ID, K, "aborted")
        case "gone":
            side.intents.peer_gone(HOLDER_ID, "restarted")
        case _:
            assert said(actions) == []
    (failed,) = told(actions + side.take())
    assert isinstance(failed, BindFailed)
    assert failed.reason
    assert side.intents.is_idle


def test_withdrawn_intent_is_told_to_the_holder_only():
    side = Waiting()
    side.intend()
    with pytest.raises(TransferStateError, match="already"):
        side.intend()
    side.intents.withdraw(K)
    assert side.take()[0].message == Cancel(K, 0)
    side.intents.withdraw(K)
    side.intents.bound(HOLDER_ID, K, 0)
    assert side.take() == []


# --- the context side


class Scheduled:
    def __init__(self, limit: int = 100) -> None:
        self.out: list[Action] = []
        self.bindings = Bindings(limit, self.out.append)

    def take(self, peer=PEER) -> list[object]:
        out, self.out[:] = list(self.out), []
        return said(out, peer)


@pytest.mark.parametrize("intent_first", [True, False])
def test_intent_and_schedule_meet_in_either_order(intent_first: bool):
    side = Scheduled()
    steps = [lambda: side.bindings.intent(PEER, K), lambda: side.bindings.scheduled(BindContext(K, 1))]
    for step in steps if intent_first else reversed(steps):
        assert side.take() == []
        step()
    assert side.take() == [Bind(K, 1)]
    side.bindings.sampled(SendFirstTokens(K, b"first"))
    assert side.take() == [FirstTokens(K, b"first")]


def test_everything_is_said_again_to_an_intent_that_comes_again():
    side = Scheduled()
    side.bindings.intent(PEER, K)
    side.bindings.scheduled(BindContext(K, 0))
    side.bindings.sampled(SendFirstTokens(K, b"first"))
    side.bindings.handed_off(K)
    side.take()
    side.bindings.intent(PEER, K)
    assert side.take() == [Bind(K, 0), FirstTokens(K, b"first")]


def test_cache_may_be_delivered_before_anything_is_sampled():
    side = Scheduled()
    side.bindings.intent(PEER, K)
    side.bindings.scheduled(BindContext(K))
    side.bindings.handed_off(K)
    side.take()
    side.bindings.sampled(SendFirstTokens(K, b"first"))
    assert side.take() == [FirstTokens(K, b"first")]


def test_leg_that_ends_before_its_first_token_tells_who_waits():
    side = Scheduled()
    side.bindings.intent(PEER, K)
    side.bindings.scheduled(BindContext(K))
    side.take()
    side.bindings.over(K, "aborted")
    side.bindings.over(K, "aborted")
    assert side.take() == [NotBound(K, "aborted")]
    side.bindings.sampled(SendFirstTokens(K, b"late"))
    assert side.take() == []
    side.bindings.intent(PEER, K)
    assert side.take() == [Bind(K, 0), NotBound(K, "aborted")]


def test_attempt_belongs_to_the_first_peer_that_waits():
    side = Scheduled()
    side.bindings.intent(PEER, K)
    side.bindings.intent(OTHER, K)
    (refused,) = side.take(OTHER)
    assert isinstance(refused, NotBound)
    side.bindings.scheduled(BindContext(K))
    assert side.take(OTHER) == []
    with pytest.raises(TransferStateError, match="already"):
        side.bindings.scheduled(BindContext(K))


def test_memory_of_intents_is_bounded_but_running_legs_are_kept():
    side = Scheduled(limit=3)
    side.bindings.scheduled(BindContext(K))
    for number in range(2, 50):
        side.bindings.intent(PEER, key(number))
    assert len(side.bindings._known) == 3
    side.bindings.intent(PEER, K)
    assert side.take()[-1] == Bind(K, 0)
