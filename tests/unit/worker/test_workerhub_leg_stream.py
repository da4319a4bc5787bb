"""The stream of a leg's events: tokens that wait come together, and nothing is lost, late or out of order."""

from __future__ import annotations

import asyncio

import pytest

from isthmus_core.errors import InternalError
from isthmus_core.generation import FinishReason, TokenLogprobs, Tokens, joined, singles
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineRequest, Finished, LegReport, RequestType, Sampling
from isthmus_worker.process_engine.legs import LegStream

KEY = RequestKey(1 << 41)
RATED = (TokenLogprobs(-0.5), TokenLogprobs(-1.0))


def stream() -> LegStream:
    request = EngineRequest(KEY, RequestType.CONTEXT_AND_GENERATION, (1, 2), Sampling(9))
    return LegStream(request, lambda _: None)


async def test_what_waits_comes_together_and_what_is_read_at_once_does_not() -> None:
    leg = stream()
    leg.put(Tokens((1,)))
    assert await anext(leg) == Tokens((1,))
    leg.put(Tokens((2,), logprobs=RATED[:1]))
    leg.put(Tokens((3,), logprobs=RATED[1:], reason=FinishReason.STOP))
    leg.put(Finished(LegReport()))
    assert await anext(leg) == Tokens((2, 3), 0, RATED, FinishReason.STOP)
    assert isinstance(await anext(leg), Finished)


async def test_answers_drafts_and_ends_are_kept_apart() -> None:
    leg = stream()
    said = [
        Tokens((1,), drafts=(7,)),
        Tokens((2,)),
        Tokens((3,), 1),
        Tokens((4,)),
        Tokens((5,), 0, (), FinishReason.STOP),
    ]
    for one in said:
        leg.put(one)
    leg.put(InternalError("broken"))
    read = [await anext(leg) for _ in range(4)]
    assert read == [*said[:3], Tokens((4, 5), 0, (), FinishReason.STOP)]
    with pytest.raises(InternalError):
        await anext(leg)


async def test_messages_stay_short() -> None:
    leg = stream()
    for token in range(100):
        leg.put(Tokens((token,)))
    first, second = await anext(leg), await anext(leg)
    assert isinstance(first, Tokens)
    assert isinstance(second, Tokens)
    assert (len(first.ids), first.ids + second.ids) == (64, tuple(range(100)))


async def test_gathering_ends_with_the_leg() -> None:
    leg = stream()
    loop = asyncio.get_running_loop()
    began = loop.time()
    gathering = asyncio.create_task(leg.gather(30))
    await asyncio.sleep(0)
    leg.put(Tokens((1,)))
    leg.put(Finished(LegReport()))
    await gathering
    assert loop.time() - began < 20
    leg = stream()
    leg.put(Tokens((1,)))
    await leg.gather(0.01)  # no end: the time passes
    assert await anext(leg) == Tokens((1,))


def test_chunks_are_joined_and_taken_apart() -> None:
    both = joined(Tokens((1,), 2, RATED[:1]), Tokens((5,), 2, RATED[1:], FinishReason.LENGTH))
    assert both is not None
    assert both == Tokens((1, 5), 2, RATED, FinishReason.LENGTH)
    assert list(singles(both)) == [Tokens((1,), 2, RATED[:1]), Tokens((5,), 2, RATED[1:], FinishReason.LENGTH)]
    assert joined(Tokens((1,), 0, (), FinishReason.STOP), Tokens((2,))) is None
    assert list(singles(Tokens((), 0, (), FinishReason.STOP))) == [Tokens((), 0, (), FinishReason.STOP)]
