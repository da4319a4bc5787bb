"""The Python client against a router made of three lines."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import grpc
import pytest
from isthmus.v1 import generation_pb2, inference_service_pb2, inference_service_pb2_grpc
from rich.console import Console

from isthmus_client import Client, Message, SyncClient, Tool
from isthmus_client.generation import build_request
from isthmus_client.timeline import render_timeline, timeline_from_report
from isthmus_core.errors import IsthmusError, UnknownModel
from isthmus_core.rpc import RpcServer, abort_with


def _report() -> generation_pb2.RequestReport:
    report = generation_pb2.RequestReport(decode_tokens=10, context_instance="c", generation_instance="g")
    report.prefill.FromMilliseconds(20)
    report.decode.FromMilliseconds(500)
    report.total.FromMilliseconds(600)
    report.handoff.bytes = 2_000_000
    report.handoff.descriptors = 3
    report.handoff.path = "nixl/test"
    report.handoff.wire.FromMilliseconds(2)
    return report


class _Router(inference_service_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.requests: list[inference_service_pb2.InferenceServiceGenerateRequest] = []

    async def Generate(self, request, context) -> AsyncIterator[inference_service_pb2.InferenceServiceGenerateResponse]:
        self.requests.append(request)
        if request.model == "nobody":
            await abort_with(context, UnknownModel("nobody", ["tiny"]))
        try:
            yield inference_service_pb2.InferenceServiceGenerateResponse(text="Hel", token_ids=[1], request_id=1 << 41)
            if request.prompt == "hang":
                await asyncio.sleep(60)
            yield inference_service_pb2.InferenceServiceGenerateResponse(
                text="lo", token_ids=[2, 3], finish_reason=generation_pb2.FINISH_REASON_STOP, stop="!"
            )
            finished = inference_service_pb2.GenerateFinished(
                prompt_tokens=4, completion_tokens=3, report=_report(), cached_tokens=2
            )
            yield inference_service_pb2.InferenceServiceGenerateResponse(finished=finished)
        finally:
            self.cancelled.set()

    async def ListModels(self, request, context) -> inference_service_pb2.ListModelsResponse:
        card = inference_service_pb2.ModelCard(name="tiny", max_model_len=99)
        return inference_service_pb2.ListModelsResponse(models=[card])


@pytest.fixture
async def router():
    server, servicer = RpcServer(), _Router()
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1:0")
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_an_answer_streams_and_ends_with_its_timeline(router):
    _, endpoint = router
    async with Client(endpoint) as client:
        parts = [part async for part in client.generate("Say hello")]
        answer = await client.answer("Say hello")
        models = await client.list_models()
    assert [part.text for part in parts] == ["Hel", "lo", ""]
    assert {part.request_id for part in parts} == {1 << 41}
    assert (answer.text, answer.token_ids) == ("Hello", (1, 2, 3))
    assert (answer.reason, answer.stopped_by, answer.end.reason, answer.end.cached_tokens) == ("stop", "!", "stop", 2)
    assert answer.end.timeline.decode_tokens_per_s == pytest.approx(20)
    assert answer.end.timeline.handoff is not None
    assert answer.end.timeline.handoff.gigabytes_per_s == pytest.approx(1.0)
    assert answer.end.timeline.generation_queue_s is None
    assert (models[0].name, models[0].max_model_len) == ("tiny", 99)


async def test_leaving_early_cancels_the_call_at_the_router(router):
    servicer, endpoint = router
    async with Client(endpoint) as client:
        parts = client.generate("hang")
        assert (await anext(parts)).text == "Hel"
        await parts.aclose()
        await asyncio.wait_for(servicer.cancelled.wait(), 20)


async def test_errors_arrive_with_code_and_detail(router):
    _, endpoint = router
    async with Client(endpoint) as client:
        with pytest.raises(IsthmusError, match="nobody") as caught:
            await client.answer("x", model="nobody")
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert list(caught.value.detail.known) == ["tiny"]


async def test_the_blocking_client_does_the_same(router):
    _, endpoint = router

    def use() -> tuple[str, str, str]:
        with SyncClient(endpoint) as client:
            streamed = "".join(part.text for part in client.generate([Message("user", "hi")]))
            return streamed, client.answer("x").text, client.list_models()[0].name

    assert await asyncio.to_thread(use) == ("Hello", "Hello", "tiny")


def test_the_kind_of_prompt_decides_the_field():
    assert build_request("text").WhichOneof("input") == "prompt"
    assert list(build_request([1, 2]).prompt_token_ids.ids) == [1, 2]
    chat = build_request([Message("system", "be brief"), Message("user", "hi")]).chat
    assert [(row.role, row.content) for row in chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert not build_request("x").HasField("max_tokens")
    with pytest.raises(ValueError, match="mixes"):
        build_request([Message("user", "hi"), 3])  # type: ignore[list-item]


def test_options_are_set_only_when_given():
    assert not build_request("x").sampling.ListFields()
    request = build_request("x", temperature=0, seed=0, top_k=3, stop="a", logit_bias={5: -1.5}, n=2, cache_salt=b"s")
    assert request.sampling.HasField("temperature")
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("top_p")
    assert (request.sampling.top_k, request.sampling.n, request.cache_salt) == (3, 2, b"s")
    assert [(entry.token_id, entry.bias) for entry in request.sampling.logit_bias] == [(5, -1.5)]
    assert list(request.stop) == ["a"]
    assert list(build_request("x", stop=["a", "bc"]).stop) == ["a", "bc"]
    assert not build_request("x", temperature=None).sampling.HasField("temperature")


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(TypeError, match="tempreature"):
        build_request("x", tempreature=1)  # type: ignore[call-arg]
    for name, value in (("tools", [Tool("f")]), ("template_arguments", {"a": 1}), ("continue_final_message", True)):
        with pytest.raises(ValueError, match=name):
            build_request("x", **{name: value})  # type: ignore[arg-type]


async def test_several_answers_are_asked_for_by_name(router):
    _, endpoint = router
    async with Client(endpoint) as client:
        with pytest.raises(ValueError, match="answers"):
            await client.answer("x", n=2)
        assert [answer.text for answer in await client.answers("x", n=1)] == ["Hello"]


def test_a_timeline_shows_only_what_happened():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_timeline(timeline_from_report(_report())))
    text = console.export_text()
    assert "1.91 MiB in 3 descriptors over nixl/test" in text
    assert "1.00 GB/s" in text
    assert "20.0 tokens/s" in text
    unsplit = timeline_from_report(generation_pb2.RequestReport(generation_instance="u"))
    console.print(render_timeline(unsplit))
    assert "hand-off" not in console.export_text()
