"""The openai SDK against the router: every parameter, streaming and not. Workers are stand-ins that echo backwards."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from isthmus.v1.generation_pb2 import SamplingParams

from isthmus_core import token_ids
from isthmus_core.ids import MIN_GLOBAL_ID
from router_site import Router

pytestmark = pytest.mark.integration
USER: list[Any] = [{"role": "user", "content": "x"}]
# What the stand-ins answer to USER, token by token: the conversation backwards.
BACKWARDS = "user: x\nassistant:"[::-1]


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router().running() as router:
        yield router


@pytest.fixture
async def client(router: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with router.openai() as client:
        yield client


def sampling(router: Router) -> SamplingParams:
    """What the last request asked of both workers."""
    context, generation = router.context.servicer.requests[-1], router.generation.servicer.requests[-1]
    assert context.sampling == generation.sampling
    return context.sampling


async def chat(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.chat.completions.create(**{"model": "m", "messages": USER, **options})


async def chat_stream(client: openai.AsyncOpenAI, **options: Any) -> list[Any]:
    return [chunk async for chunk in await chat(client, stream=True, **options)]


async def test_sampling_parameters_reach_both_workers(router: Router, client: openai.AsyncOpenAI) -> None:
    await chat(
        client,
        temperature=0.5,
        top_p=0.25,
        seed=77,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        logit_bias={"65": -100, "66": 5},
        max_completion_tokens=7,
        extra_body={"top_k": 5, "min_p": 0.125, "repetition_penalty": 1.25, "min_tokens": 3, "stop_token_ids": [1]},
    )
    sent = sampling(router)
    assert (sent.temperature, sent.top_p, sent.seed) == (0.5, 0.25, 77)
    assert (sent.presence_penalty, sent.frequency_penalty) == (-1.5, 0.5)
    assert {entry.token_id: entry.bias for entry in sent.logit_bias} == {65: -100, 66: 5}
    assert (sent.top_k, sent.min_p, sent.repetition_penalty, sent.min_tokens) == (5, 0.125, 1.25, 3)
    assert (sent.max_tokens, list(sent.stop_token_ids)) == (7, [256, 1])


async def test_each_request_without_a_seed_gets_one_of_its_own(router: Router, client: openai.AsyncOpenAI) -> None:
    seeds: set[int] = set()
    for _ in range(3):
        await chat(client, max_tokens=2)
        seeds.add(sampling(router).seed)
    assert len(seeds) == 3


async def test_requests_with_a_salt_are_kept_apart(router: Router, client: openai.AsyncOpenAI) -> None:
    await chat(client, max_tokens=2, extra_body={"cache_salt": "tenant"})
    assert router.context.servicer.requests[-1].cache_salt == b"tenant"


async def test_usage_tells_the_cached_part_of_the_prompt(client: openai.AsyncOpenAI) -> None:
    usage = (await chat(client, max_tokens=4)).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(BACKWARDS), 4)
    assert usage.prompt_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers_to_a_chat(client: openai.AsyncOpenAI, stream: bool) -> None:
    if stream:
        chunks = await chat_stream(client, n=3, max_tokens=5, stream_options={"include_usage": True})
        texts, reasons = ["", "", ""], {}
        for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunks[-1].usage
        assert sum(chunk.choices[0].delta.role == "assistant" for chunk in chunks if chunk.choices) == 3
    else:
        answer = await chat(client, n=3, max_tokens=5)
        texts = [choice.message.content for choice in answer.choices]
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
        usage = answer.usage
    assert texts == [BACKWARDS[:5]] * 3
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(BACKWARDS), 15)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_answers(router: Router, client: openai.AsyncOpenAI, stream: bool) -> None:
    options: Any = {"model": "m", "prompt": ["abc", "de"], "n": 2, "max_tokens": 9}
    texts = [""] * 4
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(**options, stream=True)]
        for choice in (chunk.choices[0] for chunk in chunks):
            texts[choice.index] += choice.text
        assert len({chunk.id for chunk in chunks}) == 1
    else:
        answer = await client.completions.create(**options)
        texts = [choice.text for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 10)
    assert texts == ["cba", "cba", "ed", "ed"]
    assert len({request.key.request_id for request in router.context.servicer.requests}) == 2


@pytest.mark.parametrize("prompt", [[99, 98, 97], [[99, 98, 97], [99, 98, 97]]])
async def test_prompts_of_token_ids(client: openai.AsyncOpenAI, prompt: Any) -> None:
    answer = await client.completions.create(model="m", prompt=prompt)
    assert {choice.text for choice in answer.choices} == {"abc"}


@pytest.mark.parametrize("stop", ["sis", ["zz", "na"], [], [":"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings(router: Router, client: openai.AsyncOpenAI, stop: Any, stream: bool) -> None:
    found = [at for item in ([stop] if isinstance(stop, str) else stop) if (at := BACKWARDS.find(item)) >= 0]
    shown = BACKWARDS[: min(found)] if found else BACKWARDS
    if stream:
        chunks = await chat_stream(client, stop=stop)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        last = (await chat(client, stop=stop)).choices[0]
        text = last.message.content
    assert text == shown
    assert last.finish_reason == ("stop" if found else "length")
    # What the workers would have gone on with is cancelled, and pages that nobody will fetch are given back.
    await router.until("len(r.coordinator.finished) == 1")
    if found == [0]:
        await router.until("len(r.context.servicer.aborts) == 1")
        assert router.generation.servicer.requests == []


async def test_a_stop_string_can_be_shown(client: openai.AsyncOpenAI) -> None:
    answer = await chat(client, stop="sis", extra_body={"include_stop_str_in_output": True})
    assert answer.choices[0].message.content == BACKWARDS[: BACKWARDS.index("sis") + 3]
    assert answer.choices[0].stop_reason == "sis"


async def test_a_stop_token_and_the_models_end(router: Router, client: openai.AsyncOpenAI) -> None:
    ended = await client.completions.create(model="m", prompt=[97, 256, 98])
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("b", "stop")
    ignored = await client.completions.create(model="m", prompt=[97, 256, 98], extra_body={"ignore_eos": True})
    assert (ignored.choices[0].text, ignored.choices[0].finish_reason) == ("ba", "length")
    shown = await client.completions.create(
        model="m", prompt=[97, 256, 98], extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert shown.choices[0].text == "b<end>a"
    stopped = await client.completions.create(model="m", prompt="abcd", extra_body={"stop_token_ids": [98]})
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("dc", "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat(client: openai.AsyncOpenAI, stream: bool) -> None:
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    if stream:
        chunks = await chat_stream(client, **options)
        rated = [chunk.choices[0].logprobs for chunk in chunks]
        content = [entry for item in rated if item is not None for entry in item.content]
    else:
        content = (await chat(client, **options)).choices[0].logprobs.content
    assert [entry.token for entry in content] == list(BACKWARDS[:3])
    assert [entry.bytes for entry in content] == [[ord(char)] for char in BACKWARDS[:3]]
    assert [entry.logprob for entry in content] == [-1.0] * 3
    first = content[0].top_logprobs
    assert [(entry.token, entry.logprob) for entry in first] == [(":", -1.0), (";", -2.0)]
    plain = (await chat(client, logprobs=True, max_tokens=2)).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in plain] == [[], []]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_text(client: openai.AsyncOpenAI, stream: bool) -> None:
    options: Any = {"model": "m", "prompt": list("é!".encode()[::-1]), "logprobs": 1}
    if stream:
        chunks = [chunk async for chunk in await client.completions.create(**options, stream=True)]
        parts = [chunk.choices[0].logprobs for chunk in chunks]
    else:
        parts = [(await client.completions.create(**options)).choices[0].logprobs]
    parts = [part for part in parts if part is not None]
    assert [token for part in parts for token in part.tokens or ()] == ["\\xc3", "\\xa9", "!"]
    # The offsets count characters: the two halves of one are at the same place.
    assert [offset for part in parts for offset in part.text_offset or ()] == [0, 0, 1]
    assert [value for part in parts for value in part.token_logprobs or ()] == [-1.0] * 3
    assert [entry for part in parts for entry in part.top_logprobs or ()][2] == {"!": -1.0}


async def test_characters_cut_over_tokens_stream_whole_in_every_answer(client: openai.AsyncOpenAI) -> None:
    prompt = list("é🎉".encode()[::-1])
    stream = await client.completions.create(model="m", prompt=prompt, n=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
        assert "�" not in chunk.choices[0].text
    assert texts == ["é🎉"] * 3


async def test_tools_and_tool_calls_go_into_the_template(router: Router, client: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    messages: Any = [
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    for choice, shown in (("auto", True), ("none", False)):
        await chat(client, messages=messages, tools=tools, tool_choice=choice, max_tokens=1)
        prompt = bytes(token_ids.unpack(router.context.servicer.requests[-1].prompt.le_uint32)).decode()
        assert prompt.startswith("tools: [") is shown
        assert prompt.endswith(
            'system: Use tools.\nuser: Weather?\nassistant:  get_weather({"city": "Bern"})\ntool: sunny\nassistant:'
        )


async def test_an_answer_can_be_sent_back_as_a_turn(client: openai.AsyncOpenAI) -> None:
    message = (await chat(client, max_tokens=3)).choices[0].message
    again = [*USER, message.model_dump(), {"role": "user", "content": "more"}]
    assert (await chat(client, messages=again, max_tokens=3)).usage.prompt_tokens > len(BACKWARDS)


async def test_the_last_turn_can_be_continued(router: Router, client: openai.AsyncOpenAI) -> None:
    messages = [*USER, {"role": "assistant", "content": "Once"}]
    await chat(client, messages=messages, max_tokens=1, extra_body={"continue_final_message": True})
    prompt = bytes(token_ids.unpack(router.context.servicer.requests[-1].prompt.le_uint32))
    assert prompt == b"user: x\nassistant: Once"


async def test_request_ids(router: Router, client: openai.AsyncOpenAI) -> None:
    number = MIN_GLOBAL_ID + 99
    headers = {"X-Request-Id": str(number)}
    raw = await client.completions.with_raw_response.create(model="m", prompt="abc", extra_headers=headers)
    assert raw.headers["x-request-id"] == str(number)
    assert (raw.parse()).id == f"cmpl-{number}"
    assert router.context.servicer.requests[-1].key.request_id == number
    named = await client.completions.with_raw_response.create(
        model="m", prompt="abc", extra_headers={"X-Request-Id": "3f2b-my-trace"}
    )
    assert named.headers["x-request-id"] == "3f2b-my-trace"
    assert router.context.servicer.requests[-1].key.request_id != number
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="m", prompt="abc", extra_headers={"X-Request-Id": "y" * 201})


async def test_a_live_request_id_is_refused(router: Router, client: openai.AsyncOpenAI) -> None:
    router.generation.servicer.hang_after = 0
    headers = {"X-Request-Id": str(MIN_GLOBAL_ID + 98)}
    first = asyncio.create_task(client.completions.create(model="m", prompt="abc", extra_headers=headers))
    await router.generation.servicer.hanging.wait()
    with pytest.raises(openai.ConflictError):
        await client.completions.create(model="m", prompt="abc", extra_headers=headers)
    first.cancel()
    await router.until("len(r.coordinator.finished) == 1")


async def test_a_client_can_ask_for_a_shorter_deadline(router: Router, client: openai.AsyncOpenAI) -> None:
    router.generation.servicer.hang_after = 0
    for header, status in (("0.3", 504), ("0", 400), ("soon", 400), ("inf", 400), ("nan", 400)):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="m", prompt="abc", extra_headers={"X-Request-Timeout": header})
        assert caught.value.status_code == status, header


async def test_many_prompts_fail_and_leave_together(router: Router, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="m", prompt=["abc", "x" * 5000])
    assert caught.value.param == "prompt[1]"
    await router.until("len(r.coordinator.open) == 0")
    router.generation.servicer.hang_after = 1
    stream = await client.completions.create(model="m", prompt=["abcd"] * 5, n=2, stream=True)
    await anext(aiter(stream))
    before = len(router.coordinator.finished)
    await stream.close()
    await router.until(f"len(r.coordinator.finished) >= {before} and not r.coordinator.open")


async def test_tokenize_and_detokenize(client: openai.AsyncOpenAI) -> None:
    base = str(client.base_url).removesuffix("/v1/")
    texts = await client.post(f"{base}/tokenize", body={"prompt": "é", "return_token_strs": True}, cast_to=object)
    assert texts == {"count": 2, "max_model_len": 4096, "tokens": [195, 169], "token_strs": ["\\xc3", "\\xa9"]}
    chat_ids: Any = await client.post(f"{base}/tokenize", body={"model": "m", "messages": USER}, cast_to=object)
    assert bytes(chat_ids["tokens"]).decode() == "user: x\nassistant:"
    back = await client.post(f"{base}/detokenize", body={"tokens": [195, 169, 33]}, cast_to=object)
    assert back == {"prompt": "é!"}
    for path, body, param in (
        ("tokenize", {}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("detokenize", {"tokens": [300]}, "tokens[0]"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.post(f"{base}/{path}", body=body, cast_to=object)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        await client.post(f"{base}/tokenize", body={"model": "y", "prompt": "x"}, cast_to=object)
