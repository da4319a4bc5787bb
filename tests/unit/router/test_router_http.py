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
from isthmus_router.http.app import make_app
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import ConnectionLost, LegKind, Tokens
from router_fakes import FakeCoordinator, FakeModel, FakeWorkers, Hang

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "abc"}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


class Site:
    """The application, a client of it, and the fakes behind."""

    def __init__(self, request_timeout_s: float = 20.0) -> None:
        self.coordinator = FakeCoordinator()
        self.workers = FakeWorkers()
        tracing = Tracing.from_config(TelemetryConfig(), "test")
        self.pipeline = Pipeline(
            self.coordinator, self.workers, {"m": ByteTokenizer()}, tracing, max_text_bytes=100_000
        )
        self.app = make_app(self.pipeline, max_body_bytes=50_000, request_timeout_s=request_timeout_s)
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
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}


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
    assert [choice["finish_reason"] for choice in with_choice] == [None] * 4 + ["length"]
    assert ("usage" in chunks[-1]) is usage
    if usage:
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
        {"temperature": 0.0, "top_p": 0.5},
        {"top_p": 1},
        {"n": 1, "stop": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}},
        {"user": "u", "seed": 7, "stream": False},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False},
    ],
)
async def test_harmless_fields_are_accepted(site: Site, extra: dict[str, Any]) -> None:
    assert (await site.post("chat", {**CHAT, **extra})).status_code == 200


@pytest.mark.parametrize(
    ("kind", "extra", "param"),
    [
        ("chat", {"temperature": 0.7}, "temperature"),
        ("chat", {"top_p": 0.5}, "top_p"),
        ("chat", {"top_p": 0, "temperature": 0}, "top_p"),
        ("chat", {"n": 2}, "n"),
        ("chat", {"n": True}, "n"),
        ("chat", {"stop": ["x"]}, "stop"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"tools": [{"type": "function"}]}, "tools"),
        ("chat", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("chat", {"presence_penalty": 0.1}, "presence_penalty"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": "5"}, "max_tokens"),
        ("chat", {"max_tokens": 10**30}, "max_tokens"),
        ("chat", {"max_completion_tokens": 5000}, "max_completion_tokens"),
        ("chat", {"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"model": 5}, "model"),
        ("chat", {"best_temperature": 1}, "best_temperature"),
        ("text", {"echo": True}, "echo"),
        ("text", {"best_of": 2}, "best_of"),
        ("text", {"suffix": "x"}, "suffix"),
        ("text", {"logprobs": 0}, "logprobs"),
        ("text", {"prompt": ""}, "prompt"),
        ("text", {"prompt": ["a", "b"]}, "prompt"),
        ("text", {"prompt": [97, 300]}, "prompt[1]"),
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
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert site.coordinator.selects == []


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


async def test_a_client_that_does_not_read_is_dropped_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_router.http.exchange.LAST_WORD_S", 0.05)
    site = Site(request_timeout_s=0.3)
    exchange = Exchange(site, {**CHAT, "stream": True})
    exchange.reads = False
    await exchange.task
    assert site.coordinator.open == set()
    assert len(site.coordinator.finished) == 1


async def test_a_body_that_is_announced_as_too_large_is_not_read(site: Site) -> None:
    exchange = Exchange(site, None, headers=[(b"content-length", b"50001")])
    await exchange.task
    assert exchange.sent[0]["status"] == 413
