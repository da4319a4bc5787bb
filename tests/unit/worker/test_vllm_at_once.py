"""Both legs at once on vLLM: what the hub is told of first tokens, and what ends a leg that waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_core.errors import RequestCancelled, ScheduleUnsupported, TransferFailed
from isthmus_worker.engine import (
    ContextReady,
    EngineRequest,
    Finished,
    FinishReason,
    LegReport,
    RequestType,
    Sampling,
    Tokens,
)
from isthmus_worker.vllm_engine.at_once import WaitedFor, Waiting, going_on
from isthmus_worker.wire.engine_frames import LegEnded
from isthmus_worker.wire.tokens import first_tokens_from_bytes, first_tokens_to_bytes
from kvtransfer.ports import (
    BindFailed,
    Bound,
    CancelTransfer,
    FirstTokensArrived,
    Holder,
    RequestKey,
    SendFirstTokens,
    TransferFailure,
)

KEY = RequestKey(1 << 50, 1)
HOLDER = Holder("h:1", "context-0", b"i" * 16)
GOES_ON = Tokens((7,))
STOPPED = Tokens((2,), reason=FinishReason.STOP)
READY = ContextReady((GOES_ON,), LegReport())


def waiting() -> Waiting:
    side = Waiting()
    side.begin(EngineRequest(KEY, RequestType.GENERATION_ONLY, (1, 2), Sampling(8), context=HOLDER))
    return side


@pytest.mark.parametrize("bound_first", [True, False])
def test_first_tokens_are_said_when_the_leg_is_bound_and_over(bound_first):
    side = WaitedFor()
    side.begin(KEY)
    said = [*side.bound(KEY), *side.ended(KEY, READY)] if bound_first else [*side.ended(KEY, READY), *side.bound(KEY)]
    (first,) = said
    assert isinstance(first, SendFirstTokens)
    assert first_tokens_from_bytes(first.payload) == (GOES_ON,)
    assert not side.holds(KEY)


def test_first_tokens_are_said_after_the_cache_was_taken():
    """The front of vLLM may be late."""
    side = WaitedFor()
    side.begin(KEY)
    side.bound(KEY)
    side.over(KEY)
    (first,) = side.ended(KEY, READY)
    assert isinstance(first, SendFirstTokens)
    side.begin(KEY)
    side.bound(KEY)
    side.tokens(KEY, STOPPED)
    side.over(KEY)
    assert [type(one) for one in side.ended(KEY, Finished(LegReport()))] == [SendFirstTokens]
    assert not side.holds(KEY)


def test_an_answer_that_has_ended_is_told_and_then_withdrawn():
    side = WaitedFor()
    side.begin(KEY)
    side.bound(KEY)
    side.tokens(KEY, STOPPED)
    first, withdrawn = side.ended(KEY, Finished(LegReport()))
    assert isinstance(first, SendFirstTokens)
    assert first_tokens_from_bytes(first.payload) == (STOPPED,)
    assert withdrawn == CancelTransfer(KEY)
    assert side.holds(KEY)
    side.over(KEY)
    assert not side.holds(KEY)


def test_what_is_dropped_or_not_waited_for_says_nothing():
    side = WaitedFor()
    side.begin(KEY)
    assert side.ended(KEY, RequestCancelled()) == []
    assert side.bound(KEY) == []
    assert side.ended(RequestKey(5, 0), READY) == []


def test_answers_that_have_ended_end_the_leg_that_waits():
    end = waiting().heard(FirstTokensArrived(KEY, first_tokens_to_bytes([STOPPED])))
    assert isinstance(end, LegEnded)
    assert isinstance(end.end, Finished)
    some = FirstTokensArrived(KEY, first_tokens_to_bytes([STOPPED, replace(GOES_ON, sample=1)]))
    assert waiting().heard(some) is None
    assert going_on(some) == {1}
    assert going_on(Bound(KEY, 0)) == set()


@pytest.mark.parametrize("bound", [True, False])
def test_a_leg_whose_first_tokens_do_not_come_fails(bound: bool):
    for failure, error in {
        TransferFailure.PEER_UNKNOWN: ScheduleUnsupported,
        TransferFailure.TIMED_OUT: TransferFailed,
    }.items():
        side = waiting()
        if bound:
            assert side.heard(Bound(KEY, 0)) is None
        end = side.heard(BindFailed(KEY, failure, "why"))
        assert isinstance(end, LegEnded)
        assert isinstance(end.end, error)
        assert side.heard(BindFailed(KEY, failure, "again")) is None


def test_first_tokens_that_can_not_be_read_fail_the_leg():
    end = waiting().heard(FirstTokensArrived(KEY, b"\xff"))
    assert isinstance(end, LegEnded)
    assert isinstance(end.end, TransferFailed)


def test_a_leg_that_is_over_hears_nothing():
    side = waiting()
    side.over(KEY)
    assert side.heard(FirstTokensArrived(KEY, first_tokens_to_bytes([STOPPED]))) is None
