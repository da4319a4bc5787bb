"""generation_first in the router, and the context leg is lost: the other leg goes on alone, or the pair is given up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from isthmus.v1 import errors_pb2

from isthmus_core.errors import IsthmusError, RemoteError, TransferFailed
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_router import taking_over
from isthmus_router.ports import ConnectionLost, LegKind, Tokens, TookOver
from isthmus_router.requests import End, GenerateRequest, Part, TextInput
from isthmus_router.retry import RetryPolicy
from isthmus_router.rules import Rules
from isthmus_router.sampling import SamplingOptions
from isthmus_router.schedules import ScheduleRule
from router_bench import PipelineBench
from router_fakes import STOP, Hang, Pause, finished, last, ready

KEY = RequestKey(MIN_GLOBAL_ID + 7)
CANCELLED = RemoteError("the request was cancelled", None, grpc.StatusCode.CANCELLED)
TRANSFER = RemoteError("failed", errors_pb2.TransferFailed(), grpc.StatusCode.UNAVAILABLE)
BROKEN = RemoteError("the model has no answer")
ASKED = GenerateRequest(
    operation="test", model="m", input=TextInput("abc"), timeout_s=3600.0, request_id=KEY.request_id
)


@pytest.fixture(name="bench")
def _bench() -> PipelineBench:
    return PipelineBench(Rules(ScheduleRule(0), retry=RetryPolicy(max_attempts=1)), max_text_bytes=1000)


def tokens_of(parts: list[Part | End]) -> list[int]:
    return [token for part in parts if isinstance(part, Part) for token in part.token_ids]


async def settle(bench: PipelineBench, aborts: int) -> None:
    """Everything is over, and the context instance was told so often."""
    await bench.pipeline.close()
    assert bench.coordinator.open == set()
    assert bench.workers.running == bench.pipeline.running == 0
    assert bench.workers.aborted == [("context-0", KEY)] * aborts


@pytest.mark.parametrize("error", [CANCELLED, TRANSFER, BROKEN])
async def test_every_token_is_that_of_the_leg_that_goes_on(bench: PipelineBench, error: RemoteError) -> None:
    go = asyncio.Event()
    bench.script(LegKind.CONTEXT, error)
    bench.script(LegKind.GENERATION, Pause(go), TookOver("gone"), Tokens((72,)), last(105), finished())
    task = asyncio.create_task(bench.answer(ASKED))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done(), "the router waits a moment"
    go.set()
    parts = await task
    assert tokens_of(parts) == [72, 105]
    assert isinstance(parts[-1], End)
    await settle(bench, 0)


async def test_a_context_leg_that_still_works_is_withdrawn(bench: PipelineBench) -> None:
    bench.script(LegKind.CONTEXT, Hang())
    bench.script(LegKind.GENERATION, TookOver("not bound"), Tokens((72,)), last(105), finished())
    assert tokens_of(await bench.answer(ASKED)) == [72, 105]
    await settle(bench, 1)


@pytest.mark.parametrize("said", [[Tokens((72,)), last(105)], [last(72, 105)]])
async def test_what_the_client_has_is_not_said_again(bench: PipelineBench, said: list[Tokens]) -> None:
    go = asyncio.Event()
    bench.script(LegKind.CONTEXT, ready())
    bench.script(LegKind.GENERATION, Pause(go), TookOver("no first token"), *said, finished())
    task = asyncio.create_task(bench.answer(ASKED))
    while not bench.coordinator.prefills:
        await asyncio.sleep(0)
    go.set()
    assert tokens_of(await task) == [72, 105]
    await settle(bench, 1)


async def test_an_answer_that_has_ended_stays_ended(bench: PipelineBench) -> None:
    go = asyncio.Event()
    bench.script(LegKind.CONTEXT, ready([Tokens((72,), 0, reason=STOP), Tokens((73,), 1)]))
    mine = [Tokens((72,), 0, reason=STOP), Tokens((73,), 1), replace(last(105), sample=1)]
    bench.script(LegKind.GENERATION, Pause(go), TookOver("no first token"), *mine, finished())
    task = asyncio.create_task(bench.answer(replace(ASKED, sampling=SamplingOptions(n=2))))
    while not bench.coordinator.prefills:
        await asyncio.sleep(0)
    go.set()
    assert sorted(tokens_of(await task)) == [72, 73, 105]
    await settle(bench, 1)


async def test_another_first_token_than_the_client_has_is_an_error(bench: PipelineBench) -> None:
    go = asyncio.Event()
    bench.script(LegKind.CONTEXT, ready())
    bench.script(LegKind.GENERATION, Pause(go), TookOver("no first token"), Tokens((99,)), last(105), finished())
    task = asyncio.create_task(bench.answer(ASKED))
    while not bench.coordinator.prefills:
        await asyncio.sleep(0)
    go.set()
    with pytest.raises(TransferFailed, match="other tokens"):
        await task
    await settle(bench, 1)


@pytest.mark.parametrize("failing", [True, False], ids=["fails too", "says nothing"])
async def test_a_leg_that_does_not_take_over_ends_with_the_first_reason(
    bench: PipelineBench, failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking_over, "PATIENCE_S", 60.0 if failing else 0.05)
    bench.script(LegKind.CONTEXT, BROKEN)
    bench.script(LegKind.GENERATION, *([Pause(go := asyncio.Event()), TRANSFER] if failing else [Hang()]))
    task = asyncio.create_task(bench.answer(ASKED))
    for _ in range(20):
        await asyncio.sleep(0)
    if failing:
        go.set()
    with pytest.raises(IsthmusError, match="no answer"):
        await task
    await settle(bench, 0)


REFUSED = RemoteError("full", errors_pb2.Overloaded(), grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(("error", "aborts"), [(REFUSED, 0), (ConnectionLost("gone"), 1)], ids=["refused", "lost"])
async def test_what_had_not_begun_or_is_lost_is_not_waited_for(
    bench: PipelineBench, error: IsthmusError, aborts: int
) -> None:
    bench.script(LegKind.CONTEXT, error)
    bench.script(LegKind.GENERATION, Hang())
    with pytest.raises(IsthmusError):
        await asyncio.wait_for(bench.answer(ASKED), taking_over.PATIENCE_S / 2)
    await settle(bench, aborts)
