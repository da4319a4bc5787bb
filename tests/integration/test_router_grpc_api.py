"""The gRPC API over real sockets: the same options as over HTTP, typed errors that name the field."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from isthmus.v1 import errors_pb2
from isthmus.v1 import inference_service_pb2 as pb

from isthmus_client import Client, Message, Tool, ToolCall
from isthmus_core import token_ids
from isthmus_core.errors import IsthmusError, from_rpc_error
from router_site import Router

pytestmark = pytest.mark.integration


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router().running() as router:
        yield router


@pytest.fixture
async def client(router: Router) -> AsyncIterator[Client]:
    async with Client(router.config.listen) as client:
        yield client


async def test_every_option_reaches_both_workers(router: Router, client: Client) -> None:
    await client.answer(
        "abcdef",
        model="m",
        max_tokens=6,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=0,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={65: -1.0},
        min_tokens=2,
        stop_token_ids=[1],
        cache_salt=b"salt",
        logprobs=3,
    )
    context, generation = router.context.servicer.requests[0], router.generation.servicer.requests[0]
    sent = context.sampling
    assert generation.sampling == sent
    assert (sent.temperature, sent.top_p, sent.top_k, sent.min_p, sent.seed) == (0.5, 0.25, 7, 0.125, 0)
    assert (sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (1.5, -1.5, 1.25)
    assert [(entry.token_id, entry.bias) for entry in sent.logit_bias] == [(65, -1.0)]
    assert (sent.min_tokens, sent.max_tokens, list(sent.stop_token_ids)) == (2, 6, [256, 1])
    assert (sent.n, sent.logprobs) == (1, 3)
    assert {context.cache_salt, generation.cache_salt} == {b"salt"}


async def test_zero_is_not_absent(router: Router, client: Client) -> None:
    await client.answer("abc", temperature=0, top_p=1, logprobs=0)
    sent = router.context.servicer.requests[0].sampling
    assert sent.temperature == 0
    assert sent.HasField("logprobs")
    plain = pb.InferenceServiceGenerateRequest(prompt="abc")
    _ = [part async for part in router.stub.Generate(plain)]
    assert not router.context.servicer.requests[1].sampling.HasField("logprobs")


async def test_answers_by_index_with_log_probabilities(client: Client) -> None:
    answers = await client.answers("olleh", n=2, max_tokens=9, logprobs=2)
    assert [answer.text for answer in answers] == ["hello", "hello"]
    assert [answer.reason for answer in answers] == ["length", "length"]
    for answer in answers:
        assert [entry.logprob for entry in answer.logprobs] == [-1.0] * 5
        assert answer.logprobs[0].top == ((104, -1.0), (105, -2.0))
        assert (answer.end.prompt_tokens, answer.end.completion_tokens, answer.end.cached_tokens) == (5, 10, 2)


@pytest.mark.parametrize(("include", "shown"), [(False, "he"), (True, "hell")])
async def test_stop_strings(router: Router, client: Client, include: bool, shown: str) -> None:
    answer = await client.answer("olleh", stop=["zz", "ll"], include_stop=include)
    assert (answer.text, answer.reason, answer.stopped_by) == (shown, "stop", "ll")
    assert answer.end.completion_tokens == 4
    await router.until("len(r.coordinator.finished) == 1")


async def test_a_stop_token_is_named_and_the_models_end_is_not(client: Client) -> None:
    answer = await client.answer("olleh", stop_token_ids=[ord("l")])
    assert (answer.text, answer.reason, answer.stopped_by) == ("he", "stop", ord("l"))
    ended = await client.answer([97, 256, 98])
    assert (ended.text, ended.reason, ended.stopped_by) == ("b", "stop", None)
    shown = await client.answer([97, 256, 98], ignore_eos=True, keep_special_tokens=True)
    assert shown.text == "b<end>a"


async def test_conversations_with_tools(router: Router, client: Client) -> None:
    messages = [
        Message("user", "Weather?"),
        Message("assistant", "", tool_calls=[ToolCall("get", {"city": "Bern"}, "c1")]),
        Message("tool", "sunny", tool_call_id="c1"),
    ]
    await client.answer(messages, tools=[Tool("get", "Gets it.", {"type": "object"})], max_tokens=1)
    prompt = bytes(token_ids.unpack(router.context.servicer.requests[0].prompt.le_uint32)).decode()
    assert prompt.startswith('tools: [{"type": "function", "function": {"name": "get"')
    assert prompt.endswith('user: Weather?\nassistant:  get({"city": "Bern"})\ntool: sunny\nassistant:')


async def test_tokenize_and_detokenize(client: Client) -> None:
    assert await client.tokenize("é") == [195, 169]
    assert bytes(await client.tokenize([Message("user", "x")])).decode() == "user: x\nassistant:"
    assert await client.detokenize([195, 169]) == "é"
    with pytest.raises(IsthmusError) as caught:
        await client.detokenize([999])
    assert isinstance(caught.value.detail, errors_pb2.InvalidField)
    assert caught.value.detail.field == "token_ids[0]"
    with pytest.raises(IsthmusError) as unknown:
        await client.tokenize("x", model="nope")
    assert unknown.value.code is grpc.StatusCode.NOT_FOUND


def chat(*messages: pb.ChatMessage, **fields: Any) -> pb.ChatInput:
    return pb.ChatInput(messages=messages or (pb.ChatMessage(role="user", content="x"),), **fields)


CALL = pb.ToolCall(name="f", arguments_json='{"a": NaN}')
NAN = float("nan")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": pb.SamplingOptions(temperature=2.5)}, "sampling.temperature"),
        ({"sampling": pb.SamplingOptions(temperature=NAN)}, "sampling.temperature"),
        ({"sampling": pb.SamplingOptions(top_p=0)}, "sampling.top_p"),
        ({"sampling": pb.SamplingOptions(min_p=NAN)}, "sampling.min_p"),
        ({"sampling": pb.SamplingOptions(presence_penalty=float("inf"))}, "sampling.presence_penalty"),
        ({"sampling": pb.SamplingOptions(repetition_penalty=0)}, "sampling.repetition_penalty"),
        ({"sampling": pb.SamplingOptions(n=17)}, "sampling.n"),
        ({"sampling": pb.SamplingOptions(logprobs=21)}, "sampling.logprobs"),
        ({"sampling": pb.SamplingOptions(logit_bias=[{"token_id": 999}])}, "sampling.logit_bias[999]"),
        ({"sampling": pb.SamplingOptions(logit_bias=[{"token_id": 9, "bias": NAN}])}, "sampling.logit_bias[9]"),
        ({"sampling": pb.SamplingOptions(min_tokens=9), "max_tokens": 8}, "sampling.min_tokens"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop_token_ids": [257]}, "stop_token_ids[0]"),
        ({"chat": chat(tools=[pb.Tool()])}, "chat.tools[0].name"),
        ({"chat": chat(tools=[pb.Tool(name="f", parameters_json="[]")])}, "chat.tools[0].parameters_json"),
        ({"chat": chat(tools=[pb.Tool(name="f", parameters_json="[" * 9999)])}, "chat.tools[0].parameters_json"),
        (
            {"chat": chat(pb.ChatMessage(role="assistant", tool_calls=[CALL]))},
            "chat.messages[0].tool_calls[0].arguments_json",
        ),
        ({"chat": chat(template_arguments_json='{"messages": []}')}, "chat.template_arguments_json.messages"),
        ({"chat": chat(template_arguments_json='{"x": "\\ud800"}')}, "chat.template_arguments_json"),
    ],
)
async def test_wrong_options_are_named(router: Router, fields: dict[str, Any], field: str) -> None:
    source = {} if "chat" in fields else {"prompt": "abc"}
    request = pb.InferenceServiceGenerateRequest(**source, **fields)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [part async for part in router.stub.Generate(request)]
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error.detail, errors_pb2.InvalidField)
    assert error.detail.field == field
    assert router.coordinator.selects == []
