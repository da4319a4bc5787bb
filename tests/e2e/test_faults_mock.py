"""Faults under load: clients that leave, processes that die or stop. Typed errors in time, every page comes back."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client
from isthmus_client.client import get_cluster
from isthmus_client.supervisor import LocalCluster
from isthmus_core.errors import IsthmusError
from isthmus_core.rpc import open_channel
from mock_oracle import oracle, printable_prompts

pytestmark = pytest.mark.timeout(90)

# What a client may be told about a fault that is not its own.
FAULTS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
# Slow enough for faults to meet requests in every phase.
SLOW = {"mock": {"decode_us": 4000, "prefill_us_per_token": 100}}
Outcome = list[int] | IsthmusError


async def _ask(client: Client, prompt: Sequence[int], max_tokens: int, timeout_s: float = 30) -> Outcome:
    try:
        return list((await client.answer(prompt, max_tokens=max_tokens, timeout_s=timeout_s)).token_ids)
    except IsthmusError as error:
        return error


def _check(prompts: Sequence[Sequence[int]], outcomes: Sequence[Outcome], max_tokens: int) -> int:
    """Every outcome is the right text or a fault with a type and a reason; returns the number of faults."""
    faults = 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if isinstance(outcome, IsthmusError):
            assert outcome.code in FAULTS, (outcome.code, outcome.message)
            assert outcome.message
            assert outcome.detail is not None, outcome.message
            faults += 1
        else:
            assert outcome == oracle(prompt, max_tokens), f"prompt of {len(prompt)} tokens"
    return faults


async def _serves_again(client: Client) -> None:
    """Requests are refused until the pair is ready again, then served."""
    async with asyncio.timeout(30):
        while isinstance(outcome := await _ask(client, [66] * 40, 4), IsthmusError):
            assert outcome.code in FAULTS, outcome.message
            await asyncio.sleep(0.2)
    assert outcome == oracle([66] * 40, 4)


@asynccontextmanager
async def _faulty_cluster(
    folder: Path, engine: dict[str, Any], attempts: int = 3, **transfer: float | str
) -> AsyncGenerator[tuple[LocalCluster, Client], None]:
    base = {
        "engine": engine,
        "transfer": transfer,
        "worker": {"drain_s": 2},
        "router": {"drain_s": 2, "retry": {"max_attempts": attempts}},
    }
    base["coordinator"] = {"lease_ttl_s": 2}
    async with (
        running_cluster(replace(MOCK, base=base), folder, restart=True, clean=False) as cluster,
        Client(cluster.grpc_endpoint) as client,
    ):
        stopping = asyncio.Event()
        keeping = asyncio.create_task(cluster.supervise(stopping))
        try:
            yield cluster, client
        finally:
            stopping.set()
            await keeping


def _process(cluster: LocalCluster, name: str, part: str) -> psutil.Process:
    """The hub of a worker, or its engine."""
    hub = psutil.Process(cluster.process(name).pid)
    if part == "hub":
        return hub
    (engine,) = hub.children()
    return engine


@pytest.mark.parametrize("name", ["context-0", "generation-0"])
@pytest.mark.parametrize("part", ["engine", "hub"])
async def test_a_part_killed_under_load(tmp_path: Path, name: str, part: str):
    prompts = printable_prompts(60, seed=11)
    async with _faulty_cluster(tmp_path, SLOW) as (cluster, client):
        asking = [asyncio.create_task(_ask(client, prompt, 60)) for prompt in prompts]
        # The first answer is complete, others decode, are handed off, are prefilled and wait.
        await asyncio.wait(asking, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        _process(cluster, name, part).kill()
        assert not [task.result() for task in asking if task.done() and not isinstance(task.result(), list)]
        outcomes = await asyncio.gather(*asking)
        assert _check(prompts, outcomes, 60) > 0
        await _serves_again(client)
        await assert_idle(cluster)
        again = await asyncio.gather(*(_ask(client, prompt, 4) for prompt in prompts[:20]))
        assert _check(prompts[:20], again, 4) == 0
        await assert_idle(cluster)


@pytest.mark.parametrize(("part", "then"), [("engine", "fail"), ("hub", "fail"), ("hub", "recompute")])
async def test_a_context_instance_stopped_for_longer_than_a_hand_off_may_take(tmp_path: Path, part: str, then: str):
    prompts = printable_prompts(30, seed=5)
    # Few rows: most hand-offs are asked for while the context instance, which holds their pages, does not move.
    engine = {"max_running": 4, "mock": {"decode_us": 5000}}
    transfer = {"timeout_s": 2.0, "handoff_hold_s": 20.0, "ping_interval_s": 0.5, "on_transfer_failure": then}
    # One attempt: what the instances say is what the client gets.
    async with _faulty_cluster(tmp_path, engine, attempts=1, **transfer) as (cluster, client):
        asking = [asyncio.create_task(_ask(client, prompt, 40, timeout_s=60)) for prompt in prompts]
        await asyncio.wait(asking, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        stopped = _process(cluster, "context-0", part)
        stopped.suspend()
        try:
            await asyncio.sleep(5)
            over = [task.result() for task in asking if task.done()]
            failed = [outcome for outcome in over if isinstance(outcome, IsthmusError)]
            # Either the clients are told, or the generation instance computes the prompts itself.
            assert bool(failed) == (then == "fail")
            assert over
            held = await _generation_pages(cluster)
        finally:
            stopped.resume()
        assert held > 0, "nobody has said that the writes are over"
        assert (_check(prompts, await asyncio.gather(*asking), 40) > 0) == (then == "fail")
        await assert_idle(cluster)
        await _serves_again(client)
        assert stopped.is_running()


async def _generation_pages(cluster: LocalCluster) -> int:
    """Pages of the generation instance that are not free."""
    (spec,) = [spec for spec in cluster.specs if spec.name == "generation-0"]
    async with open_channel(spec.address) as channel:
        stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
        state = await stub.ListSessions(kv_transfer_service_pb2.ListSessionsRequest(), timeout=10)
    return state.total_pages - state.free_pages


async def _leave(client: Client, prompt: Sequence[int], draw: random.Random) -> None:
    """Go away after a few parts, or after a short time, whatever has come by then."""
    parts = client.generate(prompt, max_tokens=300, timeout_s=60)
    wanted, patience_s = draw.choice([0, 1, 1, 2, 10]), draw.choice([0.0, 0.01, 0.3, 1.0, 3.0])
    try:
        async with asyncio.timeout(patience_s + 0.001):
            for _ in range(wanted):
                await anext(parts)
            if not wanted:
                await anext(parts)
    except TimeoutError:
        pass
    finally:
        await parts.aclose()


async def _leave_http(client: httpx.AsyncClient, prompt: Sequence[int], draw: random.Random) -> None:
    """The same over server-sent events: the connection is closed, which is all that an HTTP client can say."""
    body = {"model": "mock", "prompt": list(prompt), "max_tokens": 300, "stream": True}
    wanted, patience_s = draw.choice([1, 2, 10]), draw.choice([0.01, 0.3, 1.0, 3.0])
    try:
        async with asyncio.timeout(patience_s), client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            lines = response.aiter_lines()
            for _ in range(wanted):
                await anext(lines)
    except TimeoutError:
        pass


async def test_a_storm_of_clients_that_leave(tmp_path: Path):
    draw = random.Random(2)
    prompts = printable_prompts(240, seed=3)
    limits = httpx.Limits(max_connections=None)
    async with _faulty_cluster(tmp_path, SLOW) as (cluster, client):
        async with httpx.AsyncClient(base_url=cluster.http_endpoint, trust_env=False, limits=limits, timeout=30) as web:
            leaving = [_leave(client, prompt, draw) for prompt in prompts[:160]]
            leaving += [_leave_http(web, prompt, draw) for prompt in prompts[160:200]]
            staying = [_ask(client, prompt, 20, timeout_s=60) for prompt in prompts[200:]]
            outcomes, _ = await asyncio.gather(asyncio.gather(*staying), asyncio.gather(*leaving))
        assert _check(prompts[200:], outcomes, 20) == 0
        await assert_idle(cluster)
        await _serves_again(client)


async def test_the_coordinator_is_started_again_under_load(tmp_path: Path):
    prompts = printable_prompts(60, seed=8)
    async with _faulty_cluster(tmp_path, SLOW) as (cluster, client):
        asking = [asyncio.create_task(_ask(client, prompt, 60)) for prompt in prompts]
        await asyncio.wait(asking, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        cluster.process("coordinator").signal_group(signal.SIGKILL)
        for prompt in prompts[:40]:  # until instances and routers are back, and some time on
            asking.append(asyncio.create_task(_ask(client, prompt, 60)))
            await asyncio.sleep(0.15)
        outcomes = await asyncio.gather(*asking)
        # Requests that have their place need no coordinator, and the others wait for the next one.
        assert _check([*prompts, *prompts[:40]], outcomes, 60) == 0
        await _serves_again(client)
        await assert_idle(cluster)
        # What the instances have cached has been told again.
        members = (await get_cluster(cluster.coordinator_endpoint)).members
        assert len(members) >= 2
        assert all(member.indexed_blocks for member in members)
