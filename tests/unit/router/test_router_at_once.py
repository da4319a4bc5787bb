"""generation_first in the router: both legs at once over scripted workers, and what ends them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest
from isthmus.v1 import errors_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from isthmus_core.errors import InternalError, IsthmusError, RemoteError, WorkerLost
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Tracing
from isthmus_router import taking_over
from isthmus_router.ports import ConnectionLost, LegKind, Tokens
from isthmus_router.requests import End, GenerateRequest, Part, TextInput
from isthmus_router.retry import RetryPolicy
from isthmus_router.rules import Rules
from isthmus_router.schedules import ScheduleRule
from router_bench import PipelineBench
from router_fakes import CONTEXT, STOP, WHOLE, Hang, Pause, finished, last, ready

KEY = RequestKey(MIN_GLOBAL_ID + 7)
UNSUPPORTED = RemoteError("too old", errors_pb2.ScheduleUnsupported(context_instance_id="context-0", reason="too old"))
OVERLOOKED = RemoteError("absent", errors_pb2.InvalidField(field="context_phase", value="absent"))
BROKEN = RemoteError("the model has no answer")


class Bench(PipelineBench):
    """Starts both legs at once."""

    def __init__(self, tracing: Tracing | None = None, **coordinator: object) -> None:
        rules = Rules(ScheduleRule(0), retry=RetryPolicy(max_attempts=1))
        super().__init__(rules, tracing, max_text_bytes=1000, **coordinator)

    async def run(self, number: int = 0, **changes: object) -> list[Part | End]:
        return await self.answer(ask(number, **changes))

    async def settle(self, *, aborted: bool) -> None:
        """Everything is over, and the context instance was told exactly when it may hold pages."""
        await self.pipeline.close()
        assert self.coordinator.open == set()
        assert self.workers.running == self.pipeline.running == 0
        assert self.workers.aborted == ([("context-0", KEY)] if aborted else [])


def ask(number: int = 0, **changes: object) -> GenerateRequest:
    fields = {"operation": "test", "model": "m", "input": TextInput("abc"), "timeout_s": 3600.0}
    return GenerateRequest(**{**fields, "request_id": KEY.request_id + number, **changes})  # type: ignore[arg-type]


def tokens_of(parts: list[Part | End]) -> list[int]:
    return [token for part in parts if isinstance(part, Part) for token in part.token_ids]


async def test_both_legs_start_at_once_and_know_of_each_other() -> None:
    bench = Bench()
    go = asyncio.Event()
    bench.script(LegKind.CONTEXT, Pause(go), ready())
    bench.script(LegKind.GENERATION, Pause(go), last(105), finished(handoff=True))
    task = asyncio.create_task(bench.run())
    while len(bench.workers.legs) < 2:
        await asyncio.sleep(0)
    legs = {leg.kind: leg for _, leg in bench.workers.legs}
    assert legs[LegKind.GENERATION].context == CONTEXT
    assert legs[LegKind.GENERATION].context_phase is None
    assert legs[LegKind.CONTEXT].generation_waits
    go.set()
    parts = await task
    assert tokens_of(parts) == [72, 105]
    end = parts[-1]
    assert isinstance(end, End)
    assert end.report.handoff.bytes == 4096
    assert end.report.prefill.seconds == 1
    assert (end.report.context_instance, end.report.generation_instance) == ("context-0", "generation-0")
    await bench.settle(aborted=False)


async def test_the_first_token_is_sent_before_the_generation_leg_answers() -> None:
    bench = Bench()
    go = asyncio.Event()
    bench.script(LegKind.GENERATION, Pause(go), last(105), finished())
    async with aclosing(bench.pipeline.generate(ask())) as parts:
        assert (await anext(parts)).text == "H"
        go.set()
        assert (await anext(parts)).text == "i"
    await bench.settle(aborted=False)


async def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    bench = Bench()
    go = asyncio.Event()
    bench.script(LegKind.CONTEXT, Pause(go), ready())
    bench.script(LegKind.GENERATION, Tokens((105,)), last(33), finished())
    task = asyncio.create_task(bench.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    assert tokens_of(await task) == [72, 105, 33]
    await bench.settle(aborted=False)


@pytest.mark.parametrize("generation", [[Hang()], [finished()], [Pause(asyncio.Event())]])
async def test_a_first_token_that_ends_the_request_ends_the_generation_leg(generation: list[object]) -> None:
    bench = Bench()
    bench.script(LegKind.CONTEXT, last(72, reason=STOP), finished())
    bench.script(LegKind.GENERATION, *generation)
    parts = await bench.run()
    assert tokens_of(parts) == [72]
    end = parts[-1]
    assert isinstance(end, End)
    assert end.report.generation_instance == ""
    await bench.settle(aborted=False)


FAILURES: dict[str, tuple[LegKind, list[object], list[object], bool]] = {
    # name: the leg that fails, its script, the script of the other one, whether the context leg is withdrawn
    "context at once": (LegKind.CONTEXT, [BROKEN], [Hang()], False),
    "generation at once": (LegKind.GENERATION, [BROKEN], [Hang()], True),
    "generation during prefill": (LegKind.GENERATION, [Pause(asyncio.Event()), BROKEN], [Hang()], True),
    "generation after the first token": (LegKind.GENERATION, [BROKEN], [ready()], True),
    "generation after a token": (LegKind.GENERATION, [Tokens((105,)), BROKEN], [ready()], False),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_an_error_of_one_leg_ends_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking_over, "PATIENCE_S", 0.01)
    kind, failing, other, withdrawn = FAILURES[name]
    for step in failing:
        if isinstance(step, Pause):
            step.go.set()
    bench = Bench()
    bench.script(kind, *failing)
    bench.script(LegKind.CONTEXT if kind is LegKind.GENERATION else LegKind.GENERATION, *other)
    with pytest.raises(IsthmusError, match="no answer"):
        await bench.run()
    await bench.settle(aborted=withdrawn)


@pytest.mark.parametrize(
    ("kind", "phase"), [(LegKind.CONTEXT, "prefill"), (LegKind.GENERATION, "hand-off")], ids=["context", "generation"]
)
async def test_a_lost_instance_is_named(kind: LegKind, phase: str) -> None:
    bench = Bench()
    bench.script(LegKind.CONTEXT, Hang())
    bench.script(LegKind.GENERATION, Hang())
    bench.script(kind, ConnectionLost("gone"))
    with pytest.raises(WorkerLost) as caught:
        await bench.run()
    assert isinstance(caught.value.detail, errors_pb2.WorkerLost)
    assert caught.value.detail.phase == phase
    await bench.settle(aborted=True)


@pytest.mark.parametrize("pieces", [0, 1, 2])
async def test_a_client_that_leaves_ends_both_legs(pieces: int) -> None:
    bench = Bench()
    hang = Hang()
    bench.script(LegKind.CONTEXT, *([ready()] if pieces else [hang]))
    bench.script(LegKind.GENERATION, *([Tokens((105,))] if pieces == 2 else []), hang)
    parts = bench.pipeline.generate(ask())
    for _ in range(pieces):
        await anext(parts)
    waiting = asyncio.create_task(anext(parts))
    await hang.reached.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await parts.aclose()
    await bench.settle(aborted=pieces < 2)


async def test_a_generation_leg_that_ends_before_its_answers_is_a_bug() -> None:
    bench = Bench()
    bench.script(LegKind.GENERATION, finished())
    with pytest.raises(InternalError):
        await bench.run()
    await bench.settle(aborted=True)


@pytest.mark.parametrize("refusal", [UNSUPPORTED, OVERLOOKED])
async def test_a_pair_that_can_not_do_it_gets_context_first(
    refusal: RemoteError, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "router", {})
    bench = Bench(tracing)
    play = bench.workers.generate

    def generate(instance, leg, **options):  # type: ignore[no-untyped-def]
        waits = leg.kind is LegKind.GENERATION and leg.context is not None
        bench.script(LegKind.GENERATION, *([refusal] if waits else [last(105), finished()]))
        return play(instance, leg, **options)

    bench.workers.generate = generate  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert tokens_of(await bench.run()) == [72, 105]
    assert [leg.context_phase is not None for _, leg in bench.workers.legs] == [False, False, True]
    # The next request of the pair does not ask again, and nothing more is said about it.
    assert tokens_of(await bench.run(1)) == [72, 105]
    assert [leg.context_phase is not None for _, leg in bench.workers.legs[3:]] == [False, True]
    assert sum("context_first" in record.message for record in caplog.records) == 1
    tracing.flush()
    roots = [span for span in exporter.get_finished_spans() if span.name == "test"]
    assert [span.attributes["isthmus.schedule"] for span in roots if span.attributes] == ["context_first"] * 2
    await bench.settle(aborted=False)


async def test_an_unsplit_placement_is_one_leg() -> None:
    bench = Bench(placement=WHOLE)
    assert tokens_of(await bench.run()) == [72, 105]
    assert [leg.kind for _, leg in bench.workers.legs] == [LegKind.BOTH]
    await bench.settle(aborted=False)
