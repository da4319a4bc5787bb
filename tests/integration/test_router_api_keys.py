"""API keys and quotas at both front ends of a router, and that every refusal is counted by its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from isthmus.v1 import inference_service_pb2 as pb
from prometheus_client import CollectorRegistry

from isthmus_client.client import Client
from isthmus_core.api_keys import ApiKey, hash_key, new_key, write_keys
from isthmus_core.config import ClientsConfig
from isthmus_core.errors import IsthmusError, retry_after_s
from isthmus_core.metrics import Metrics
from isthmus_router.recorder import RequestRecorder
from router_site import Router

pytestmark = pytest.mark.integration

KEY = new_key()
BODY = {"model": "m", "prompt": "hello", "max_tokens": 2}
ASKED = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]


@pytest.fixture(name="registry")
def _registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """What the router counts."""
    registry = CollectorRegistry()
    monkeypatch.setattr("isthmus_router.pipeline.RequestRecorder", lambda: RequestRecorder(Metrics(registry), ("m",)))
    return registry


def router(tmp_path: Path, **limits: Any) -> Router:
    path = tmp_path / "keys.yaml"
    write_keys(path, [ApiKey(name="alice", sha256=hash_key(KEY), **limits)])
    return Router(clients=ClientsConfig(keys_file=path))


def http(site: Router, key: str | None = KEY) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=site.url, trust_env=False, timeout=20, headers=headers)


def refusals(registry: CollectorRegistry, reason: str) -> float:
    return registry.get_sample_value("isthmus_refusals_total", {"reason": reason}) or 0.0


async def test_http_asks_for_a_key(tmp_path: Path, registry: CollectorRegistry):
    async with router(tmp_path).running() as site:
        async with http(site, None) as stranger:
            answers = [await stranger.post(path, json={}) for path in ASKED]
            answers += [await stranger.get(path) for path in ("/v1/models", "/v1/models/m")]
            for answer in answers:
                assert answer.status_code == 401, answer.url
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
            # What load balancers and tools look at is for everybody.
            for path in ("/health", "/version", "/openapi.json"):
                assert (await stranger.get(path)).status_code == 200
        assert refusals(registry, "unauthenticated") == len(answers)
        async with http(site) as alice:
            assert (await alice.post("/v1/completions", json=BODY)).status_code == 200
            assert (await alice.get("/v1/models")).status_code == 200


async def test_grpc_asks_for_a_key(tmp_path: Path, registry: CollectorRegistry):
    async with router(tmp_path).running() as site:
        stub = site.stub
        for call in (
            stub.Tokenize(pb.TokenizeRequest(prompt="hello")),
            stub.Detokenize(pb.DetokenizeRequest(token_ids=[65])),
            stub.ListModels(pb.ListModelsRequest()),
            stub.Generate(
                pb.InferenceServiceGenerateRequest(prompt="hello"), metadata=(("authorization", "x"),)
            ).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert refusals(registry, "unauthenticated") == 4
        async with Client(site.config.listen, api_key=KEY) as client:
            assert await client.list_models()
            assert await client.tokenize("hi")
            assert (await client.answer("hello", max_tokens=2)).reason


async def test_too_many_requests_are_refused_with_a_hint(tmp_path: Path, registry: CollectorRegistry):
    async with router(tmp_path, requests_per_s=0.01).running() as site:
        async with http(site) as alice:
            assert (await alice.post("/v1/completions", json=BODY)).status_code == 200
            answer = await alice.post("/v1/completions", json=BODY)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 60 < int(answer.headers["retry-after"]) <= 100
        async with Client(site.config.listen, api_key=KEY) as client:
            with pytest.raises(IsthmusError) as caught:
                await client.answer("hello")
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (retry_after_s(caught.value) or 0) > 60
        assert refusals(registry, "rate_limited") == 2


async def test_prompt_and_answer_are_paid_in_tokens(tmp_path: Path, registry: CollectorRegistry):
    async with router(tmp_path, tokens_per_min=6).running() as site, http(site) as alice:
        assert (await alice.post("/v1/completions", json=BODY)).status_code == 200
        answer = await alice.post("/v1/completions", json=BODY)
        assert answer.status_code == 429
        assert "tokens_per_min = 6" in answer.json()["error"]["message"]
        assert (await alice.get("/v1/models")).status_code == 200
        assert refusals(registry, "rate_limited") == 1


async def test_what_never_becomes_a_request_is_counted_by_reason(tmp_path: Path, registry: CollectorRegistry):
    async with Router(max_body_bytes=1024).running() as site:
        async with http(site, None) as client:
            assert (await client.post("/v1/completions", content=b"{")).status_code == 400
            assert (await client.post("/v1/completions", content=b"x" * 5000)).status_code == 413
            assert (await client.get("/nowhere")).status_code == 404
            assert (await client.get("/v1/completions")).status_code == 405
        with pytest.raises(grpc.aio.AioRpcError):
            await site.stub.Generate(pb.InferenceServiceGenerateRequest()).read()
        assert refusals(registry, "invalid_field") == 2
        assert refusals(registry, "body_too_large") == 1
        assert refusals(registry, "unknown_url") == 1
        assert refusals(registry, "http_405") == 1


async def test_a_changed_file_is_used_without_a_restart(tmp_path: Path, registry: CollectorRegistry):
    site = router(tmp_path)
    fresh = new_key()
    async with site.running(), http(site) as alice, http(site, fresh) as bob:
        assert (await bob.get("/v1/models")).status_code == 401
        write_keys(tmp_path / "keys.yaml", [ApiKey(name="bob", sha256=hash_key(fresh))])
        async with asyncio.timeout(20):
            while (await bob.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.1)
        assert (await alice.get("/v1/models")).status_code == 401
