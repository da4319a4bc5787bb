"""Bodies, numbers, clients and errors over HTTP: who is at fault, and in which shape it is said."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from http_site import CHAT, PATHS, Site, events
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
from isthmus_router.ports import ConnectionLost, LegKind, Tokens
from router_fakes import FakeModel, Hang


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
