"""Instances die under requests: the client's stream goes on as if nothing had happened, or ends with a typed error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.v1 import errors_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from isthmus_core.config import TelemetryConfig
from isthmus_core.errors import InvalidRequest, IsthmusError, NoCapacity, Overloaded, RemoteError, from_status
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import PlacementRequest
from isthmus_router.requests import End, GenerateRequest, Part, TextInput
from isthmus_router.retry import RetryPolicy
from isthmus_router.rules import Rules
from isthmus_router.sampling import SamplingOptions
from router_fakes import SPLIT, WHOLE, FakeInstance, FakeModel, FakePlacement
from router_model_workers import ModelWorkers

ID = MIN_GLOBAL_ID + 7
PATIENT = RetryPolicy(max_attempts=20, pause_s=0.0)


@dataclass
class Places:
    """A coordinator that places by list; the last one stays. `open` must be empty in the end."""

    placements: list[FakePlacement | IsthmusError]
    open: list[RequestKey] = field(default_factory=list[RequestKey])
    prefills: list[RequestKey] = field(default_factory=list[RequestKey])
    questions: list[PlacementRequest] = field(default_factory=list[PlacementRequest])
    ready: bool = True

    def served(self) -> Sequence[FakeModel]:
        return [FakeModel("m", 200)]

    def mint_id(self) -> int:
        return ID

    async def select(self, question: PlacementRequest, timeout_s: float) -> FakePlacement:
        self.questions.append(question)
        assert not self.open, "the earlier placement must be given back first"
        place = self.placements[0] if len(self.placements) == 1 else self.placements.pop(0)
        if isinstance(place, IsthmusError):
            raise place
        self.open.append(question.key)
        return place

    def prefilled(self, key: RequestKey) -> None:
        assert key in self.open
        self.prefills.append(key)

    def finish(self, key: RequestKey) -> None:
        self.open.remove(key)


def pair(number: int) -> FakePlacement:
    start = bytes([number]) * 16
    return FakePlacement(
        FakeInstance(f"context-{number}", incarnation=b"c" + start[1:]),
        FakeInstance(f"generation-{number}", incarnation=b"g" + start[1:]),
    )


class Run:
    """One request over workers that die by plan."""

    def __init__(
        self,
        *deaths: int | None,
        places: Sequence[FakePlacement | IsthmusError] = (SPLIT,),
        retry: RetryPolicy = PATIENT,
        tracing: Tracing | None = None,
        error: IsthmusError | None = None,
    ) -> None:
        self.workers = ModelWorkers(list(deaths), error)
        self.places = Places(list(places))
        self.pipeline = Pipeline(
            self.places,
            self.workers,
            {"m": ByteTokenizer()},
            tracing or Tracing.from_config(TelemetryConfig(), "test"),
            max_text_bytes=1000,
            rules=Rules(retry=retry),
        )

    async def ask(self, sampling: SamplingOptions | None = None, max_tokens: int = 9) -> list[Part | End]:
        sampling = sampling or SamplingOptions()
        request = GenerateRequest("test", "m", TextInput("hello"), 60.0, max_tokens, sampling=sampling, request_id=ID)
        try:
            async with aclosing(self.pipeline.generate(request)) as parts:
                return [part async for part in parts]
        finally:
            await self.pipeline.close()
            assert (self.places.open, self.workers.running) == ([], 0)

    async def fail(self) -> IsthmusError:
        with pytest.raises(IsthmusError) as raised:
            await self.ask()
        return raised.value


def answers(parts: list[Part | End]) -> dict[int, tuple[object, ...]]:
    """Per answer: text, tokens, log probabilities, how it ended."""
    found: dict[int, tuple[object, ...]] = {}
    for index in sorted({part.index for part in parts if isinstance(part, Part)}):
        mine = [part for part in parts if isinstance(part, Part) and part.index == index]
        ends = [(part.reason, part.stopped_by) for part in mine if part.reason is not None]
        tokens = [token for part in mine for token in part.token_ids]
        rated = [entry for part in mine for entry in part.logprobs]
        found[index] = ("".join(part.text for part in mine), tokens, rated, ends)
    return found


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 5),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    min_tokens=st.sampled_from([0, 3, 7]),
    stop_token_ids=st.sampled_from([(), tuple(range(97, 107))]),
    n=st.integers(1, 3),
    logprobs=st.sampled_from([None, 1]),
    stop=st.sampled_from([(), ("e", "qu"), ("a", "b", "c")]),
    include_stop=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(
    options=OPTIONS,
    deaths=st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=6),
    places=st.lists(st.sampled_from([SPLIT, WHOLE]), min_size=1, max_size=6),
)
async def test_an_answer_does_not_depend_on_who_dies(
    options: SamplingOptions, deaths: list[int | None], places: list[FakePlacement]
) -> None:
    undisturbed = await Run(places=[WHOLE]).ask(options)
    disturbed = await Run(*deaths, places=places).ask(options)
    assert answers(disturbed) == answers(undisturbed)
    assert isinstance(disturbed[-1], End)
    assert isinstance(undisturbed[-1], End)
    assert disturbed[-1].completion_tokens == undisturbed[-1].completion_tokens


async def test_the_id_stays_and_the_attempt_grows() -> None:
    run = Run(0, 0, None)
    end = (await run.ask())[-1]
    assert isinstance(end, End)
    assert [leg.key for _, leg in run.workers.legs] == [RequestKey(ID, attempt) for attempt in (0, 1, 2, 2)]
    assert [question.key.attempt for question in run.places.questions] == [0, 1, 2]
    assert len(end.report.retries) == 2
    assert "context-0 was lost during prefill" in end.report.retries[0]


async def test_tokens_already_sent_are_not_computed_as_output_again() -> None:
    run = Run(None, 4, places=[pair(1), pair(2)])
    parts = await run.ask()
    tokens = [token for part in parts if isinstance(part, Part) for token in part.token_ids]
    again = run.workers.legs[2][1]
    assert (again.sampling.resumed, again.sampling.max_tokens, len(again.prompt) // 4) == (5, 4, 10)
    assert list(again.prompt[20::4]) == tokens[:5]


async def test_an_instance_that_failed_is_avoided_and_used_all_the_same_when_it_is_the_only_one() -> None:
    nobody = from_status(NoCapacity("nobody").to_status())
    run = Run(0, places=[pair(1), nobody, pair(1)])
    await run.ask()
    dead = pair(1).context
    assert dead is not None
    assert [question.excluded for question in run.places.questions] == [(), (dead.incarnation,), ()]


async def test_a_request_has_a_bounded_number_of_tries() -> None:
    run = Run(*[0] * 9, retry=RetryPolicy(max_attempts=3, pause_s=0.0))
    error = await run.fail()
    assert isinstance(error.detail, errors_pb2.WorkerLost)
    assert len(run.workers.legs) == 3


async def test_all_requests_together_have_a_bounded_number_of_tries() -> None:
    run = Run(0, retry=RetryPolicy(max_attempts=3, budget_share=0.0))
    assert isinstance((await run.fail()).detail, errors_pb2.WorkerLost)
    assert len(run.workers.legs) == 1


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (RemoteError("the model has no answer"), False),
        (from_status(InvalidRequest("prompt", "x", "y").to_status()), False),
        (from_status(Overloaded("waiting", 4).to_status()), True),
        (from_status(NoCapacity("draining").to_status()), True),
    ],
)
async def test_only_errors_that_another_instance_may_not_have_are_tried_again(error: IsthmusError, again: bool) -> None:
    run = Run(0, error=error)
    if again:
        await run.ask()
    else:
        assert await run.fail() is error
    assert len({leg.key.attempt for _, leg in run.workers.legs}) == 1 + again


async def test_the_first_reason_is_told_when_no_place_is_found_any_more() -> None:
    run = Run(0, places=[SPLIT, from_status(NoCapacity("nobody").to_status())])
    assert isinstance((await run.fail()).detail, errors_pb2.WorkerLost)


async def test_an_instance_that_dies_after_its_last_token_has_answered() -> None:
    run = Run(None, 8)
    parts = await run.ask()
    assert isinstance(parts[-1], End)
    assert parts[-1].completion_tokens == 9
    assert len(run.workers.legs) == 2


async def test_a_lost_generation_withdraws_what_its_context_may_still_hold() -> None:
    run = Run(None, 0)
    await run.ask()
    assert run.workers.aborted == [RequestKey(ID, 0)]


async def test_each_try_says_once_that_its_prompt_is_computed() -> None:
    run = Run(None, 3, None, places=[pair(1), pair(2)])
    await run.ask()
    assert run.places.prefills == [RequestKey(ID, 0), RequestKey(ID, 1)]


async def test_the_trace_tells_of_every_try() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "test", {})
    await Run(0, None, tracing=tracing).ask()
    tracing.shutdown()
    spans = exporter.get_finished_spans()
    root = next(span for span in spans if span.parent is None)
    (event,) = [event for event in root.events if event.name == "retry"]
    assert event.attributes is not None
    assert "context-0" in str(event.attributes["message"])
    assert (event.attributes["reason"], event.attributes["attempt"]) == ("lost_in_prefill", 1)
    assert [(span.attributes or {}).get("isthmus.attempt") for span in spans if span.name == "route"] == [None, 1]
