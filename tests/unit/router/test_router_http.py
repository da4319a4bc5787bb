"""The OpenAI surface over a scripted pipeline: shapes, refusals by field, status codes."""

from typing import Any

import pytest

from http_site import CHAT, TEXT, Site, events


async def test_a_chat_answer(site: Site) -> None:
    response = await site.post("chat", {**CHAT, "max_completion_tokens": 3})
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    assert body["id"] == f"chatcmpl-{response.headers['x-request-id']}"
    choice = body["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi!", "length")
    prompt = len("user: hi\nassistant:")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_text_answer(site: Site) -> None:
    body = (await site.post("text", TEXT)).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"] == "Hi!"
    assert site.coordinator.selects[0][3] == 16


@pytest.mark.parametrize("usage", [False, True])
async def test_a_chat_stream(site: Site, usage: bool) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": usage}}
    response = await site.post("chat", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {f"chatcmpl-{response.headers['x-request-id']}"}
    with_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert with_choice[0]["delta"]["role"] == "assistant"
    assert "".join(choice["delta"].get("content", "") for choice in with_choice) == "Hi!"
    assert [choice["finish_reason"] for choice in with_choice] == [None] * 3 + ["length"]
    assert ("usage" in chunks[-1]) is usage
    if usage:
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_a_text_stream(site: Site) -> None:
    *chunks, done = events(await site.post("text", {**TEXT, "stream": True}))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hi!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
async def test_prompts_as_text_and_as_tokens(site: Site, prompt: Any) -> None:
    assert (await site.post("text", {"prompt": prompt})).json()["usage"]["prompt_tokens"] == 3


async def test_content_in_parts_and_the_developers_turn(site: Site) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    body = (await site.post("chat", {"messages": messages})).json()
    assert body["usage"]["prompt_tokens"] == len("system: s\nuser: ab\nassistant:")
    assert body["model"] == "m"


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0},
        {"temperature": 2, "top_p": 0.5, "top_k": -1, "min_p": 1, "repetition_penalty": 0.5},
        {"n": 1, "stop": None, "presence_penalty": -2, "frequency_penalty": 2.0, "logit_bias": {}},
        {"user": "u", "seed": -7, "stream": False, "metadata": {"a": 1}},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False},
        {"stop": [], "stop_token_ids": [], "min_tokens": 0, "skip_special_tokens": True, "cache_salt": "x"},
        {"spaces_between_special_tokens": True, "priority": 0, "parallel_tool_calls": False, "echo": False},
    ],
)
async def test_fields_are_accepted(site: Site, extra: dict[str, Any]) -> None:
    response = await site.post("chat", {**CHAT, **extra})
    assert response.status_code == 200, response.text


def tool_call(**changes: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}


@pytest.mark.parametrize(
    ("kind", "extra", "param"),
    [
        ("chat", {"temperature": 2.1}, "temperature"),
        ("chat", {"temperature": -0.1}, "temperature"),
        ("chat", {"temperature": "1"}, "temperature"),
        ("chat", {"top_p": 0}, "top_p"),
        ("chat", {"top_p": 1.01}, "top_p"),
        ("chat", {"top_k": -2}, "top_k"),
        ("chat", {"min_p": 2}, "min_p"),
        ("chat", {"repetition_penalty": 0}, "repetition_penalty"),
        ("chat", {"presence_penalty": 2.1}, "presence_penalty"),
        ("chat", {"frequency_penalty": -2.1}, "frequency_penalty"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 17}, "n"),
        ("chat", {"n": True}, "n"),
        ("chat", {"seed": 1 << 64}, "seed"),
        ("chat", {"seed": 1.5}, "seed"),
        ("chat", {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ("chat", {"stop": ["a", ""]}, "stop[1]"),
        ("chat", {"stop": 5}, "stop"),
        ("chat", {"stop_token_ids": [5, 300]}, "stop_token_ids[1]"),
        ("chat", {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ("chat", {"min_tokens": -1}, "min_tokens"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias[5]"),
        ("chat", {"logit_bias": {"300": 1}}, "logit_bias[300]"),
        ("chat", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": 3}, "logprobs"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("chat", {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ("chat", {"functions": [{"name": "f"}]}, "functions"),
        ("chat", {"audio": {}}, "audio"),
        ("chat", {"modalities": ["audio"]}, "modalities"),
        ("chat", {"priority": 1}, "priority"),
        ("chat", {"reasoning_effort": "low"}, "reasoning_effort"),
        ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("chat", {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ("chat", {"cache_salt": "x" * 1025}, "cache_salt"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": "5"}, "max_tokens"),
        ("chat", {"max_tokens": 10**30}, "max_tokens"),
        ("chat", {"max_completion_tokens": 5000}, "max_completion_tokens"),
        ("chat", {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ("chat", {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "tool_calls": [tool_call()]}]},
            "messages[0].tool_calls",
        ),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [tool_call(function={"name": "f", "arguments": "["})]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"model": 5}, "model"),
        ("chat", {"best_temperature": 1}, "best_temperature"),
        ("text", {"echo": True}, "echo"),
        ("text", {"best_of": 2}, "best_of"),
        ("text", {"suffix": "x"}, "suffix"),
        ("text", {"logprobs": 21}, "logprobs"),
        ("text", {"logprobs": True}, "logprobs"),
        ("text", {"prompt": ""}, "prompt"),
        ("text", {"prompt": []}, "prompt"),
        ("text", {"prompt": ["a", ""]}, "prompt[1]"),
        ("text", {"prompt": ["a"] * 129}, "prompt"),
        ("text", {"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ("text", {"prompt": [97, 300]}, "prompt[1]"),
        ("text", {"prompt": [[97], [97, 300]]}, "prompt[1][1]"),
        ("text", {"prompt": [97, -1]}, "prompt[1]"),
        ("text", {"prompt": ["a", 1]}, "prompt[1]"),
        ("text", {"prompt": "x" * 100}, "prompt"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    site: Site, kind: str, extra: dict[str, Any], param: str
) -> None:
    response = await site.post(kind, {**(CHAT if kind == "chat" else TEXT), **extra})
    error = response.json()["error"]
    assert response.status_code == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    # Of several prompts the good ones may have been placed already.
    assert site.coordinator.selects == [] or isinstance(extra.get("prompt"), list)
