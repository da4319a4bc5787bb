"""Both legs of every request start at once, on a split pair of mock engines: right text and transfer, nothing left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest
import pytest_asyncio
from isthmus.v1 import (
    kv_transfer_service_pb2,
    kv_transfer_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client
from isthmus_client.supervisor import LocalCluster
from isthmus_core.rpc import open_channel
from isthmus_worker.engine import Sampling
from mock_oracle import oracle, printable_prompts
from otlp import OtlpReceiver

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

# Small steps: a prompt of 600 tokens is at least five chunks.
ENGINE = {"mock": {"decode_us": 500, "prefill_us_per_token": 20}, "max_batch_tokens": 128}


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="receiver")
async def _receiver() -> AsyncGenerator[OtlpReceiver, None]:
    async with OtlpReceiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="cluster")
async def _cluster(
    tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver
) -> AsyncGenerator[LocalCluster, None]:
    base = {
        "engine": ENGINE,
        "router": {"schedule": "generation_first"},
        "telemetry": {"otlp_endpoint": receiver.endpoint},
    }
    async with running_cluster(replace(MOCK, base=base), tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _nothing_left(cluster: LocalCluster) -> AsyncGenerator[None, None]:
    yield
    await assert_idle(cluster)


async def test_100_concurrent_requests_are_all_right(cluster: LocalCluster):
    prompts = printable_prompts(100, seed=11)
    async with Client(cluster.grpc_endpoint) as client:
        answers = await asyncio.gather(*(client.answer(prompt, max_tokens=24, timeout_s=110) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == oracle(prompt, 24), f"prompt of {len(prompt)} tokens"
        handoff = answer.end.timeline.handoff
        assert handoff is not None
        assert handoff.path.startswith("nixl/")


async def test_chunks_move_while_the_prompt_is_computed(cluster: LocalCluster, receiver: OtlpReceiver):
    prompt = [32 + index * 11 % 95 for index in range(1000)]
    async with Client(cluster.grpc_endpoint) as client:
        answer = await client.answer(prompt, max_tokens=4)
    assert list(answer.token_ids) == oracle(prompt, 4)
    handoff = answer.end.timeline.handoff
    assert handoff is not None
    assert handoff.descriptors >= 8, "one for each step of the prefill"


async def test_block_boundaries_and_single_tokens(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:
        for length in (1, 15, 16, 17, 127, 128, 129, 144, 511, 512, 513, 4000):
            prompt = [32 + index * 7 % 95 for index in range(length)]
            answer = await client.answer(prompt, max_tokens=5)
            assert list(answer.token_ids) == oracle(prompt, 5), length
        one = await client.answer([65] * 400, max_tokens=1)
    assert list(one.token_ids) == oracle([65] * 400, 1)
    assert one.end.timeline.handoff is None, "the first token ended the request: there is nothing to hand off"


async def test_three_answers(cluster: LocalCluster):
    prompt = [32 + index * 3 % 95 for index in range(300)]
    hot = Sampling(12, temperature=1.0, seed=5, n=3)
    right = [oracle(prompt, 12, sampling=hot, sample=sample) for sample in range(3)]
    async with Client(cluster.grpc_endpoint) as client:
        answers = await client.answers(prompt, max_tokens=12, n=3, temperature=1.0, seed=5)
        assert [list(answer.token_ids) for answer in answers] == right
        # One answer ends with its first token, the others go on.
        stop = right[1][0]
        answers = await client.answers(
            prompt, max_tokens=12, n=3, temperature=1.0, seed=5, stop_token_ids=[stop], logprobs=2
        )
    for sample, answer in enumerate(answers):
        ends = [index for index, token in enumerate(right[sample]) if token == stop]
        made = right[sample][: ends[0] + 1] if ends else right[sample]
        assert list(answer.token_ids) == made, sample
        assert len(answer.logprobs) == len(made), "first tokens bring theirs"


async def test_an_answer_that_stops_with_its_first_token_takes_no_hand_off(cluster: LocalCluster):
    prompt = [32 + index * 5 % 95 for index in range(700)]
    first = oracle(prompt, 1)[0]
    async with Client(cluster.grpc_endpoint) as client:
        answer = await client.answer(prompt, max_tokens=50, stop_token_ids=[first])
    assert list(answer.token_ids) == [first]
    assert answer.reason == "stop"
    assert answer.end.timeline.handoff is None


async def test_clients_that_go_away_leave_nothing_behind(cluster: LocalCluster):
    draw = random.Random(3)
    async with Client(cluster.grpc_endpoint) as client:

        async def leave_after(seconds: float, prompt: list[int]) -> None:
            call = asyncio.create_task(client.answer(prompt, max_tokens=300))
            await asyncio.sleep(seconds)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        await asyncio.gather(*(leave_after(draw.uniform(0, 0.5), prompt) for prompt in printable_prompts(150, seed=3)))
        await assert_idle(cluster)
        prompt = [70] * 333
        assert list((await client.answer(prompt, max_tokens=8)).token_ids) == oracle(prompt, 8)


async def test_context_legs_that_are_cancelled_in_their_prefill_cost_no_token(
    cluster: LocalCluster, receiver: OtlpReceiver
):
    (address,) = (spec.address for spec in cluster.specs if spec.name.startswith("context"))
    prompts = [[32 + (number + index * 7) % 95 for index in range(4000)] for number in range(8)]
    async with Client(cluster.grpc_endpoint) as client, open_channel(address) as channel:
        worker = worker_service_pb2_grpc.WorkerServiceStub(channel)
        transfer = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
        calls = asyncio.gather(*(client.answer(prompt, max_tokens=8, timeout_s=110) for prompt in prompts))
        while not calls.done():
            for session in (await transfer.ListSessions(kv_transfer_service_pb2.ListSessionsRequest())).sessions:
                await worker.Abort(worker_service_pb2.AbortRequest(key=session.key))
            await asyncio.sleep(0.005)
    answers = await calls
    for prompt, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == oracle(prompt, 8)
    for _ in range(200):
        if any(span.attributes.get("isthmus.recomputed") for span in receiver.spans):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("none was cancelled in time: no generation leg has computed its prompt")


async def test_the_trace_names_the_schedule(cluster: LocalCluster, receiver: OtlpReceiver):
    async with Client(cluster.grpc_endpoint) as client:
        await client.answer([65] * 100, max_tokens=8)
    await assert_idle(cluster)
    for _ in range(100):
        roots = [span for span in receiver.spans if not span.parent_id and span.attributes.get("isthmus.schedule")]
        if roots:
            break
        await asyncio.sleep(0.1)
    assert {span.attributes["isthmus.schedule"] for span in roots} == {"generation_first"}
