"""The OpenAI surface over a scripted pipeline: shapes, refusals by field, status codes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from isthmus_core.config import TelemetryConfig
from isthmus_core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    HandoffExpired,
    InternalError,
    IsthmusError,
    NoCapacity,
    Overloaded,
)
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.http.app import Limits, make_app
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import ConnectionLost, LegKind, Tokens
from router_fakes import FakeCoordinator, FakeModel, FakeWorkers, Hang

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "abc"}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


class Site:
    """The application, a client of it, and the fakes behind."""

    def __init__(self, request_timeout_s: float = 20.0, client_timeout_s: float = 20.0) -> None:
        self.coordinator = FakeCoordinator()
        self.workers = FakeWorkers()
        tracing = Tracing.from_config(TelemetryConfig(), "test")
        self.pipeline = Pipeline(
            self.coordinator, self.workers, {"m": ByteTokenizer()}, tracing, max_text_bytes=100_000
        )
        self.app = make_app(self.pipeline, Limits(50_000, request_timeout_s, client_timeout_s))
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def post(self, kind: str, body: Any) -> httpx.Response:
        return await self.client.post(PATHS[kind], content=body if isinstance(body, bytes) else json.dumps(body))


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    yield site
    await site.client.aclose()
    await site.pipeline.close()
    assert site.coordinator.open == set()
    assert site.workers.running == 0


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


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


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe\x00",
        b'{"messages": [{"role": "user", "content": "a\xffb"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 40_000,
        b'{"a":' * 8_000,
        b'{"messages": [' + b"1," * 20_000 + b"1]}",
        b"{" + b",".join(b'"k%d":1' % i for i in range(3000)) + b"}",
    ],
)
@pytest.mark.parametrize("kind", ["chat", "text"])
async def test_broken_bodies_are_the_clients_fault(site: Site, kind: str, body: bytes) -> None:
    response = await site.post(kind, body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"temperature": %s', "temperature"),
        ('"top_p": %s', "top_p"),
        ('"min_p": %s', "min_p"),
        ('"presence_penalty": %s', "presence_penalty"),
        ('"repetition_penalty": %s', "repetition_penalty"),
        ('"logit_bias": {"5": %s}', "logit_bias[5]"),
        ('"seed": %s', "seed"),
        ('"n": %s', "n"),
    ],
)
async def test_numbers_that_are_none_are_refused_by_name(site: Site, number: str, text: str, param: str) -> None:
    response = await site.post("text", ('{"prompt": "abc", ' + text % number + "}").encode())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_body_that_is_too_large(site: Site) -> None:
    assert (await site.post("text", {"prompt": "x" * 50_000})).status_code == 413

    async def unannounced() -> AsyncIterator[bytes]:
        for _ in range(60):
            yield b" " * 1000

    response = await site.client.post("/v1/completions", content=unannounced())
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (DuplicateRequest(1 << 41), 409, None),
        (Overloaded("waiting", 5, retry_after_s=2.5), 429, "3"),
        (NoCapacity("0 generation instances"), 503, "1"),
        (ConnectionLost("reset"), 503, "1"),
        (HandoffExpired(RequestKey(1 << 41), 30), 503, "1"),
        (DeadlineExceeded("x", 1), 504, None),
        (InternalError("x"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_have_their_status(
    site: Site, error: IsthmusError, status: int, retry: str | None, stream: bool
) -> None:
    site.workers.scripts[LegKind.CONTEXT] = [error]
    response = await site.post("chat", {**CHAT, "stream": stream})
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert response.json()["error"]["message"]


async def test_an_unknown_model(site: Site) -> None:
    response = await site.post("chat", {**CHAT, "model": "nope"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_a_prompt_that_does_not_fit_has_openais_code(site: Site) -> None:
    response = await site.post("chat", {**CHAT, "max_tokens": 5000})
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_an_error_in_a_running_stream_is_its_last_event(site: Site) -> None:
    site.workers.scripts[LegKind.GENERATION] = [Tokens((105,)), ConnectionLost("reset")]
    response = await site.post("chat", {**CHAT, "stream": True})
    assert response.status_code == 200
    chunks = events(response)
    assert "generation-0" in chunks[-1]["error"]["message"]
    assert "[DONE]" not in chunks


async def test_models_health_and_version(site: Site) -> None:
    models = (await site.client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["m"]
    assert (await site.client.get("/v1/models/m")).json()["max_model_len"] == 100
    assert (await site.client.get("/v1/models/x")).status_code == 404
    assert (await site.client.get("/health")).json() == {"status": "ok", "models": ["m"]}
    assert (await site.client.get("/version")).json()["version"]
    site.coordinator.models = [FakeModel("other", 10)]
    health = await site.client.get("/health")
    assert health.status_code == 503
    assert "serves m" in health.json()["missing"][0]


async def test_wrong_paths_and_methods_answer_in_the_same_shape(site: Site) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)):
        response = await site.client.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_crash_is_a_500_in_the_same_shape(site: Site) -> None:
    site.coordinator.models = [None]  # type: ignore[list-item]
    response = await site.post("chat", CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


class Exchange:
    """One exchange with the application, message by message."""

    def __init__(self, site: Site, body: Any, *, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        if body is not None:
            self.inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[Any] = []
        self.reads = True
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": PATHS["chat"],
            "raw_path": PATHS["chat"].encode(),
            "query_string": b"",
            "headers": headers or [],
        }
        self.task = asyncio.create_task(site.app(scope, self.inbox.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        if not self.reads:
            await asyncio.Event().wait()
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [LegKind.CONTEXT, LegKind.GENERATION])
async def test_a_client_that_hangs_up_cancels_its_legs(site: Site, stream: bool, kind: LegKind) -> None:
    hang = Hang()
    site.workers.scripts[kind] = [hang]
    exchange = Exchange(site, {**CHAT, "stream": stream})
    await hang.reached.wait()
    exchange.inbox.put_nowait({"type": "http.disconnect"})
    await exchange.task
    assert site.workers.running == 0
    assert len(site.coordinator.finished) == 1
    assert not any(message.get("status", 200) != 200 for message in exchange.sent)


@pytest.mark.parametrize("limits", [{"request_timeout_s": 0.3}, {"request_timeout_s": 1000, "client_timeout_s": 0.3}])
async def test_a_client_that_does_not_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, float]
) -> None:
    monkeypatch.setattr("isthmus_router.http.exchange.LAST_WORD_S", 0.05)
    site = Site(**limits)
    exchange = Exchange(site, {**CHAT, "stream": True})
    exchange.reads = False
    await exchange.task
    assert site.coordinator.open == set()
    assert len(site.coordinator.finished) == 1


async def test_a_body_that_is_announced_as_too_large_is_not_read(site: Site) -> None:
    exchange = Exchange(site, None, headers=[(b"content-length", b"50001")])
    await exchange.task
    assert exchange.sent[0]["status"] == 413
