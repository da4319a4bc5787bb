"""The life of a request over scripted workers: what the client gets, and that nothing is ever left behind."""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from isthmus.v1 import errors_pb2

from isthmus_core import token_ids
from isthmus_core.errors import (
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    NoCapacity,
    UnknownModel,
)
from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.chat import Conversation, Turn
from isthmus_router.ports import FinishReason, LegKind, Tokens
from isthmus_router.preparation import ContextLengthExceeded
from isthmus_router.requests import ChatInput, End, GenerateRequest, Part, TokenInput
from isthmus_router.sampling import SamplingOptions
from pipeline_case import KEY, Bench, ask, reasons_of, text_of
from router_fakes import WHOLE, FakeModel, Hang, Pause, finished, last, ready


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
