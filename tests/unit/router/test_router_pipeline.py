"""The life of a request over scripted workers: what the client gets, and that nothing is ever left behind."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import pytest
from isthmus.v1 import errors_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from isthmus_core import token_ids
from isthmus_core.config import TelemetryConfig
from isthmus_core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    Overloaded,
    RemoteError,
    TransferFailed,
    UnknownModel,
    WorkerLost,
)
from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Tracing, parse_traceparent
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.chat import Conversation, Turn
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import ConnectionLost, FinishReason, LegKind, Tokens
from isthmus_router.preparation import ContextLengthExceeded
from isthmus_router.requests import ChatInput, End, GenerateRequest, Part, TextInput, TokenInput
from isthmus_router.retry import RetryPolicy
from isthmus_router.rules import Rules
from isthmus_router.sampling import SamplingOptions
from router_bench import PipelineBench
from router_fakes import WHOLE, FakeModel, Hang, Pause, finished, last, ready

KEY = RequestKey(MIN_GLOBAL_ID + 7)


class Bench(PipelineBench):
    """One try for each request."""

    def __init__(self, tracing: Tracing | None = None, **coordinator: object) -> None:
        super().__init__(Rules(retry=RetryPolicy(max_attempts=1)), tracing, **coordinator)

    async def run(self, request: GenerateRequest) -> list[Part | End]:
        return await self.answer(request)

    async def fail(self, request: GenerateRequest) -> IsthmusError:
        with pytest.raises(IsthmusError) as caught:
            await self.run(request)
        return caught.value

    async def settle(self, *, aborted: bool, placed: bool = True) -> None:
        """Everything is over: nothing placed, nothing running, the placement finished once, the abort sent or not."""
        await self.pipeline.close()
        assert self.coordinator.open == set()
        assert self.coordinator.finished == ([KEY] if placed else [])
        assert self.workers.running == 0
        assert self.pipeline.running == 0
        assert self.workers.aborted == ([("context-0", KEY)] if aborted else [])


def ask(source: object = "abc", **changes: object) -> GenerateRequest:
    text = TextInput(source) if isinstance(source, str) else source
    fields = {"operation": "test", "model": "m", "input": text, "timeout_s": 3600.0, "request_id": KEY.request_id}
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def text_of(parts: list[Part | End]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Part))


def reasons_of(parts: list[Part | End]) -> list[FinishReason]:
    return [part.reason for part in parts if isinstance(part, Part) and part.reason is not None]


async def test_a_split_request_streams_the_context_token_then_the_generation_tokens() -> None:
    bench = Bench()
    parts = await bench.run(ask(max_tokens=3))
    assert [part.token_ids for part in parts if isinstance(part, Part)] == [(72,), (105,), (33,)]
    assert text_of(parts) == "Hi!"
    end = parts[-1]
    assert isinstance(end, End)
    assert (end.prompt_tokens, end.completion_tokens) == (3, 3)
    assert reasons_of(parts) == [FinishReason.LENGTH]
    await bench.settle(aborted=False)


async def test_legs_carry_the_request() -> None:
    bench = Bench()
    await bench.run(ask(max_tokens=3))
    (context_name, context), (generation_name, generation) = bench.workers.legs
    assert (context_name, context.kind) == ("context-0", LegKind.CONTEXT)
    assert (generation_name, generation.kind) == ("generation-0", LegKind.GENERATION)
    for leg in (context, generation):
        assert leg.key == KEY
        assert token_ids.unpack(leg.prompt) == (97, 98, 99)
        assert (leg.sampling.max_tokens, leg.sampling.stop_token_ids) == (3, (256,))
    assert context.sampling == generation.sampling
    assert context.context_phase is None
    assert generation.context_phase is not None
    assert generation.context_phase.endpoint == "ctx"
    assert all(0 < left <= 3600 for left in bench.workers.timeouts)


async def test_a_model_may_name_an_adapter() -> None:
    bench = Bench()
    await bench.run(ask(model="m:poet"))
    assert [leg.adapter for _, leg in bench.workers.legs] == ["poet", "poet"]
    (question,) = bench.coordinator.questions
    assert (question.model, question.adapter) == ("m", "poet")


async def test_an_adapter_of_an_unknown_model_is_an_unknown_model() -> None:
    assert isinstance(await Bench().fail(ask(model="other:poet")), UnknownModel)


async def test_the_first_token_is_sent_before_the_generation_leg_answers() -> None:
    bench = Bench()
    go = asyncio.Event()
    bench.script(LegKind.GENERATION, Pause(go), last(105), finished())
    async with aclosing(bench.pipeline.generate(ask())) as parts:
        assert (await anext(parts)).text == "H"
        go.set()
        assert (await anext(parts)).text == "i"
    await bench.settle(aborted=False)


async def test_an_unsplit_placement_is_one_leg() -> None:
    bench = Bench(placement=WHOLE)
    parts = await bench.run(ask())
    assert text_of(parts) == "Hi"
    assert [(name, leg.kind) for name, leg in bench.workers.legs] == [("whole-0", LegKind.BOTH)]
    end = parts[-1]
    assert isinstance(end, End)
    assert (end.report.context_instance, end.report.generation_instance) == ("whole-0", "")
    await bench.settle(aborted=False)


async def test_a_first_token_that_ends_the_request_needs_no_generation_leg() -> None:
    bench = Bench()
    bench.script(LegKind.CONTEXT, last(256, reason=FinishReason.STOP), finished())
    parts = await bench.run(ask())
    end = parts[-1]
    assert isinstance(end, End)
    assert (end.completion_tokens, text_of(parts), reasons_of(parts)) == (1, "", [FinishReason.STOP])
    assert [leg.kind for _, leg in bench.workers.legs] == [LegKind.CONTEXT]
    assert (end.report.context_instance, end.report.generation_instance) == ("context-0", "")
    await bench.settle(aborted=False)


async def test_the_report_merges_both_legs_and_the_router() -> None:
    end = (await Bench().run(ask()))[-1]
    assert isinstance(end, End)
    report = end.report
    assert report.prefill.ToSeconds() == 1
    assert (report.handoff.bytes, report.decode_tokens) == (4096, 2)
    assert (report.context_instance, report.generation_instance) == ("context-0", "generation-0")
    order = [report.route, report.time_to_first_token, report.total]
    measured = [duration.ToNanoseconds() for duration in order]
    assert 0 < measured[0] <= measured[1] <= measured[2]


async def test_a_character_cut_over_the_two_legs_arrives_whole() -> None:
    bench = Bench()
    first, *rest = "é".encode()
    bench.script(LegKind.CONTEXT, ready((first,)))
    bench.script(LegKind.GENERATION, Tokens(tuple(rest)), last(0xF0), finished())
    parts = await bench.run(ask())
    assert [part.text for part in parts if isinstance(part, Part)] == ["", "é", "�"]


async def test_ignore_eos_sends_no_stop_tokens() -> None:
    bench = Bench()
    await bench.run(ask(sampling=SamplingOptions(ignore_eos=True)))
    assert all(leg.sampling.stop_token_ids == () for _, leg in bench.workers.legs)


@pytest.mark.parametrize(
    ("requested", "default", "granted"), [(None, None, 97), (None, 16, 16), (None, 500, 97), (97, None, 97), (1, 16, 1)]
)
async def test_the_token_budget_is_exactly_what_the_model_leaves(
    requested: int | None, default: int | None, granted: int
) -> None:
    bench = Bench()
    await bench.run(ask(max_tokens=requested, default_max_tokens=default))
    assert bench.coordinator.selects == [(KEY, "m", 3, granted)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(max_tokens=98), "max_tokens"),
        (ask(max_tokens=0), "max_tokens"),
        (ask(max_tokens=0, max_tokens_field="max_completion_tokens"), "max_completion_tokens"),
        (ask("a" * 100), "prompt"),
        (ask(""), "prompt"),
        (ask("x" * 200_001), "prompt"),
        (ask("half \ud800"), "prompt"),
        (ask(TokenInput(())), "prompt"),
        (ask(TokenInput((1, 257, 2), "prompt_token_ids.ids")), "prompt_token_ids.ids[1]"),
        (ask(ChatInput(Conversation(()), "chat.messages")), "chat.messages"),
        (ask(ChatInput(Conversation((Turn("user", "x"), Turn("boss", "x"))))), "messages[1].role"),
        (ask(ChatInput(Conversation((Turn("user", "\udfff"),)))), "messages[0].content"),
        (ask(request_id=1), "request_id"),
        (ask(request_id=MIN_GLOBAL_ID - 1), "request_id"),
        (ask(request_id=MAX_GLOBAL_ID), "request_id"),
    ],
)
async def test_wrong_requests_are_refused_by_field_before_anybody_is_asked(
    request_: GenerateRequest, field: str
) -> None:
    bench = Bench()
    error = await bench.fail(request_)
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert bench.coordinator.selects == []
    await bench.settle(aborted=False, placed=False)


@pytest.mark.parametrize("source", ["x" * 101, "x" * 150_000, ChatInput(Conversation((Turn("user", "x" * 150_000),)))])
async def test_text_that_can_not_fit_is_not_even_tokenised(source: object, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(ByteTokenizer, name, lambda *_, **__: pytest.fail("tokenised"))
    error = await bench.fail(ask(source))
    assert isinstance(error, ContextLengthExceeded)
    assert "bytes" in error.message


async def test_exactly_the_longest_prompt_fits() -> None:
    bench = Bench()
    await bench.run(ask("a" * 99))
    assert bench.coordinator.selects == [(KEY, "m", 99, 1)]


async def test_models_by_name() -> None:
    bench = Bench(models=[FakeModel("m", 100), FakeModel("other", 50)])
    error = await bench.fail(ask(model="nope"))
    assert isinstance(error, UnknownModel)
    assert isinstance(error.detail, errors_pb2.UnknownModel)
    # A model of the cluster whose tokenizer this router lacks can not be asked for here.
    assert list(error.detail.known) == ["m"]
    assert text_of(await bench.run(ask(model=""))) == "Hi!"


async def test_a_router_mints_ids() -> None:
    bench = Bench()
    parts = await bench.run(ask(request_id=0))
    assert {part.request_id for part in parts} == {MIN_GLOBAL_ID + 1}


async def test_a_model_that_is_not_served_now_gets_the_coordinators_reason() -> None:
    bench = Bench(models=[], error=NoCapacity("2 context instances, 0 generation instances"))
    error = await bench.fail(ask())
    assert "0 generation instances" in error.message
    await bench.settle(aborted=False, placed=False)


async def test_a_model_that_appears_while_the_reason_is_asked_for_holds_nothing() -> None:
    bench = Bench(models=[])
    assert (await bench.fail(ask())).code is grpc.StatusCode.UNAVAILABLE
    await bench.settle(aborted=False)


async def test_a_refused_duplicate_does_not_release_the_first() -> None:
    bench = Bench()
    hang = Hang()
    bench.script(LegKind.CONTEXT, hang)
    first = asyncio.create_task(bench.run(ask()))
    await hang.reached.wait()
    assert isinstance(await bench.fail(ask()), DuplicateRequest)
    assert bench.coordinator.open == {KEY}
    first.cancel()
    await asyncio.wait((first,))
    await bench.settle(aborted=True)


async def test_a_worker_that_finishes_without_the_end_of_every_answer_has_failed() -> None:
    bench = Bench()
    bench.script(LegKind.CONTEXT, ready([Tokens((72,), 0), Tokens((72,), 1)]))
    bench.script(LegKind.GENERATION, last(105, sample=1), finished())
    error = await bench.fail(ask(sampling=SamplingOptions(n=2)))
    assert isinstance(error, InternalError)
    assert "answers [0]" in error.message


LOST = ConnectionLost("connection reset")
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


async def test_what_is_missing_is_said() -> None:
    bench = Bench()
    assert bench.pipeline.missing() == []
    bench.coordinator.models = [FakeModel("other", 10)]
    assert "serves m" in bench.pipeline.missing()[0]
    bench.coordinator.ready = False
    assert bench.pipeline.missing() == ["the coordinator can not be reached"]


def traced() -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Tracing(exporter, "router", {}), exporter


async def test_one_trace_joins_the_client_the_route_and_the_legs() -> None:
    tracing, exporter = traced()
    bench = Bench(tracing)
    incoming = parse_traceparent(f"00-{'ab' * 16}-{'cd' * 8}-01")
    await bench.run(ask(operation="POST /v1/completions", trace=incoming, max_tokens=3))
    tracing.flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root, route = spans["POST /v1/completions"], spans["route"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "cd" * 8
    assert route.parent is not None
    assert route.parent.span_id == root.context.span_id
    assert root.attributes is not None
    assert root.attributes["gen_ai.request.model"] == "m"
    assert root.attributes["gen_ai.usage.input_tokens"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["isthmus.request_id"] == str(KEY.request_id)
    assert route.attributes is not None
    assert route.attributes["isthmus.context_instance"] == "context-0"
    legs = bench.workers.traces
    assert [trace.span_id if trace else None for trace in legs] == [root.context.span_id.to_bytes(8)] * 2
    assert [trace.span_id if trace else None for trace in bench.coordinator.traces] == [
        route.context.span_id.to_bytes(8)
    ]
    assert tracing.open_spans() == 0
    tracing.shutdown()


@pytest.mark.parametrize("how", ["invalid", "refused", "lost", "cancelled"])
async def test_every_failure_ends_its_spans_as_failed(how: str) -> None:
    tracing, exporter = traced()
    bench = Bench(tracing)
    if how == "cancelled":
        async with aclosing(bench.pipeline.generate(ask())) as parts:
            await anext(parts)
    else:
        bench.coordinator.error = NoCapacity("none") if how == "refused" else None
        bench.script(LegKind.CONTEXT, LOST)
        await bench.fail(ask(max_tokens=0 if how == "invalid" else None))
    tracing.flush()
    root = next(span for span in exporter.get_finished_spans() if span.name == "test")
    assert not root.status.is_ok
    assert tracing.open_spans() == 0
    tracing.shutdown()


async def test_overload_of_the_coordinator_reaches_the_client_as_it_is() -> None:
    bench = Bench(error=Overloaded("placements", 5))
    assert (await bench.fail(ask())).code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await bench.settle(aborted=False, placed=False)


async def test_a_request_waits_for_a_coordinator_that_is_started_again() -> None:
    bench = Bench()
    lapsed = NoCapacity("the lease on request ids has lapsed")
    mint, bench.coordinator.ready = bench.coordinator.mint_id, False

    def refuse() -> int:
        raise lapsed

    bench.coordinator.mint_id = refuse  # type: ignore[method-assign]
    running = asyncio.create_task(bench.run(ask(request_id=0)))
    await asyncio.sleep(0.02)
    assert not running.done()
    bench.coordinator.mint_id = mint  # type: ignore[method-assign]
    assert text_of(await running) == "Hi!"
    # One that stands and grants nothing says so.
    bench.coordinator.mint_id, bench.coordinator.ready = refuse, True  # type: ignore[method-assign]
    assert await bench.fail(ask(request_id=0)) is lapsed
