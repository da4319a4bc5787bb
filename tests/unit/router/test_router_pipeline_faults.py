"""A leg that fails, a client that leaves, a deadline that passes: typed, withdrawn, nothing left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import pytest
from isthmus.v1 import errors_pb2

from isthmus_core.config import TelemetryConfig
from isthmus_core.errors import (
    DeadlineExceeded,
    InternalError,
    RemoteError,
    TransferFailed,
    WorkerLost,
)
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import ConnectionLost, LegKind, Tokens
from isthmus_router.requests import End
from pipeline_case import KEY, LOST, Bench, ask
from router_fakes import WHOLE, FakeModel, Hang, ready

REFUSED = RemoteError("queue full", errors_pb2.Overloaded(queue="waiting", limit=1), grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("context", "generation", "code", "aborted"),
    [
        # The context instance said itself that it is over: nothing to withdraw.
        ([REFUSED], [], grpc.StatusCode.RESOURCE_EXHAUSTED, False),
        # It may be there still, with the pages.
        ([LOST], [], grpc.StatusCode.UNAVAILABLE, True),
        ([DeadlineExceeded("call", 1)], [], grpc.StatusCode.DEADLINE_EXCEEDED, True),
        ([InternalError("broken message")], [], grpc.StatusCode.INTERNAL, True),
        # The generation leg fails before the cache has moved: the pages are held for nobody.
        ([ready()], [REFUSED], grpc.StatusCode.RESOURCE_EXHAUSTED, True),
        ([ready()], [TransferFailed(KEY, "context-0", "write failed")], grpc.StatusCode.UNAVAILABLE, True),
        ([ready()], [LOST], grpc.StatusCode.UNAVAILABLE, True),
        ([ready()], [DeadlineExceeded("call", 1)], grpc.StatusCode.DEADLINE_EXCEEDED, True),
        # Later the pages have been handed off.
        ([ready()], [Tokens((105,)), LOST], grpc.StatusCode.UNAVAILABLE, False),
    ],
)
async def test_a_failing_leg_is_typed_finished_and_withdrawn(
    context: list[object], generation: list[object], code: grpc.StatusCode, aborted: bool
) -> None:
    bench = Bench()
    bench.script(LegKind.CONTEXT, *context)
    bench.script(LegKind.GENERATION, *generation)
    assert (await bench.fail(ask())).code is code
    await bench.settle(aborted=aborted)


@pytest.mark.parametrize(
    ("context", "generation", "instance", "phase"),
    [
        ([LOST], [], "context-0", "prefill"),
        ([ready()], [LOST], "generation-0", "hand-off"),
        ([ready()], [Tokens((1,)), LOST], "generation-0", "decode"),
    ],
)
async def test_a_lost_worker_is_named_with_what_it_was_doing(
    context: list[object], generation: list[object], instance: str, phase: str
) -> None:
    bench = Bench()
    bench.script(LegKind.CONTEXT, *context)
    bench.script(LegKind.GENERATION, *generation)
    error = await bench.fail(ask())
    assert isinstance(error, WorkerLost)
    assert isinstance(error.detail, errors_pb2.WorkerLost)
    assert (error.detail.instance_id, error.detail.phase) == (instance, phase)
    assert error.detail.key.request_id == KEY.request_id


@pytest.mark.parametrize(("steps", "phase"), [([LOST], "prefill"), ([Tokens((1,)), LOST], "decode")])
async def test_a_lost_unsplit_worker(steps: list[object], phase: str) -> None:
    bench = Bench(placement=WHOLE)
    bench.script(LegKind.BOTH, *steps)
    error = await bench.fail(ask())
    assert isinstance(error.detail, errors_pb2.WorkerLost)
    assert error.detail.phase == phase
    await bench.settle(aborted=False)


async def test_a_failed_withdrawal_changes_nothing_for_the_client() -> None:
    bench = Bench()
    bench.workers.abort_error = ConnectionLost("gone")
    bench.script(LegKind.GENERATION, REFUSED)
    assert await bench.fail(ask()) is REFUSED
    await bench.settle(aborted=True)


Reach = Callable[[Bench], Awaitable[object]]


def at_select(bench: Bench) -> Reach:
    bench.coordinator.gate = asyncio.Event()
    return lambda bench: bench.coordinator.selecting.wait()


def at_leg(kind: LegKind, *before: object) -> Callable[[Bench], Reach]:
    def arrange(bench: Bench) -> Reach:
        hang = Hang()
        bench.script(kind, *before, hang)
        return lambda _: hang.reached.wait()

    return arrange


@pytest.mark.parametrize(
    ("arrange", "placed", "aborted"),
    [
        (at_select, False, False),
        (at_leg(LegKind.CONTEXT), True, True),
        (at_leg(LegKind.CONTEXT, Tokens((72,))), True, True),
        (at_leg(LegKind.CONTEXT, ready()), True, True),
        (at_leg(LegKind.GENERATION), True, True),
        (at_leg(LegKind.GENERATION, Tokens((105,))), True, False),
    ],
)
async def test_a_client_that_leaves_at_any_await_leaves_nothing_behind(
    arrange: Callable[[Bench], Reach], placed: bool, aborted: bool
) -> None:
    bench = Bench()
    reach = arrange(bench)
    task = asyncio.create_task(bench.run(ask()))
    await reach(bench)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.settle(aborted=aborted, placed=placed)


@pytest.mark.parametrize(("read", "aborted"), [(1, True), (2, False)])
async def test_a_client_that_stops_reading_between_parts(read: int, aborted: bool) -> None:
    bench = Bench()
    async with aclosing(bench.pipeline.generate(ask())) as parts:
        for _ in range(read):
            await anext(parts)
    await bench.settle(aborted=aborted)


async def test_a_client_that_leaves_while_a_long_prompt_is_tokenised() -> None:
    bench = Bench(models=[FakeModel("m", 300_000)])
    task = asyncio.create_task(bench.run(ask("x" * 150_000)))
    await asyncio.sleep(0)  # the tokeniser's thread has the prompt now
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.coordinator.selects == []
    await bench.settle(aborted=False, placed=False)


async def test_a_long_prompt_is_served_as_a_short_one() -> None:
    bench = Bench(models=[FakeModel("m", 300_000)])
    end = (await bench.run(ask("x" * 150_000)))[-1]
    assert isinstance(end, End)
    assert end.prompt_tokens == 150_000


async def test_a_deadline_that_has_passed_asks_nobody() -> None:
    bench = Bench()
    assert isinstance(await bench.fail(ask(timeout_s=0.0)), DeadlineExceeded)
    assert bench.coordinator.selects == []
    await bench.settle(aborted=False, placed=False)


async def test_a_deadline_between_the_legs_withdraws_the_pages() -> None:
    bench = Bench()
    now = 0.0
    bench.pipeline = Pipeline(
        bench.coordinator,
        bench.workers,
        {"m": ByteTokenizer()},
        Tracing.from_config(TelemetryConfig(), "test"),
        max_text_bytes=100,
        clock=lambda: now,
    )
    async with aclosing(bench.pipeline.generate(ask(arrived=0.0, timeout_s=5.0))) as parts:
        await anext(parts)
        now = 6.0
        with pytest.raises(DeadlineExceeded, match="5 s"):
            await anext(parts)
    assert len(bench.workers.legs) == 1
    await bench.settle(aborted=True)
