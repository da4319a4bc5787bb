"""Orders of an operator, by way of the coordinator, to real workers; what these cache is known."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from isthmus.v1 import common_pb2
from isthmus.v1 import coordinator_service_pb2 as pb

from coord_support import Peer, Running, coordinator, peer
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.policies import Policy
from isthmus_core.block_keys import Keying, chain
from isthmus_core.errors import from_rpc_error
from mock_oracle import oracle
from worker_process import CONTEXT, GENERATION, WorkerProcess, leg, tokens, worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TO_CONTEXT, TO_GENERATION = common_pb2.INSTANCE_ROLE_CONTEXT, common_pb2.INSTANCE_ROLE_GENERATION


@dataclass(frozen=True)
class Site:
    """Workers a (context at first) and b (generation at first), and their coordinator."""

    running: Running
    cluster: Cluster
    operator: Peer
    a: WorkerProcess
    b: WorkerProcess

    async def until(self, *ready: str) -> pb.GetClusterResponse:
        """Wait until exactly these pairs are ready, for example "a>b"."""
        while True:
            cluster = await self.operator.cluster()
            found = {
                f"{one.context_instance_id}>{one.generation_instance_id}"
                for one in cluster.pairs
                if one.state == pb.PAIR_STATE_READY
            }
            if found == set(ready) and not any(one.changing_to for one in cluster.members):
                return cluster
            await asyncio.sleep(0.02)

    async def set_role(self, name: str, role: common_pb2.InstanceRole, deadline_s: int = 20) -> None:
        await self.operator.stub.SetRole(
            pb.SetRoleRequest(instance_id=name, role=role, deadline=Duration(seconds=deadline_s))
        )


async def hand_off(context: WorkerProcess, generation: WorkerProcess, number: int) -> None:
    """A split request with the right answer."""
    prompt = [32 + (number + at) % 95 for at in range(40)]
    answers = [one async for one in context.stub.Generate(leg(prompt, 6, kind=CONTEXT, number=number), timeout=30)]
    params = answers[-1].context_ready.params
    first = [token for one in params.first_tokens for token in array("I", one.tokens.le_uint32)]
    second = leg(prompt, 6, kind=GENERATION, number=number, params=params)
    rest = [one async for one in generation.stub.Generate(second, timeout=30)]
    assert first + tokens(rest) == oracle(prompt, 6)


@pytest.fixture(name="site")
async def _site(tmp_path: Path) -> AsyncGenerator[Site, None]:
    cluster = Cluster(Policy.KV_AWARE)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(coordinator(cluster=cluster))
        operator = await stack.enter_async_context(peer(running.target))
        a, b = [
            await stack.enter_async_context(
                worker(tmp_path, running.target, f"worker.role={role}", f"worker.instance_id={name}")
            )
            for name, role in (("a", "context"), ("b", "generation"))
        ]
        assert await a.serving(), a.log
        assert await b.serving(), b.log
        site = Site(running, cluster, operator, a, b)
        await site.until("a>b")
        yield site


async def test_instances_change_places_and_back_without_a_restart(site: Site):
    await hand_off(site.a, site.b, 1)
    for number in (2, 3):
        context, generation = (site.b, site.a) if number == 2 else (site.a, site.b)
        await site.set_role("a", TO_GENERATION if number == 2 else TO_CONTEXT)
        await site.set_role("b", TO_CONTEXT if number == 2 else TO_GENERATION)
        await site.until("b>a" if number == 2 else "a>b")
        await hand_off(context, generation, number)
    # What the coordinator knew of their blocks is still so.
    cluster = await site.operator.cluster()
    assert [one.indexed_blocks > 0 for one in cluster.members] == [True, True]
    # A leg that was placed before is for another instance now, not wrong.
    await site.set_role("b", TO_CONTEXT)
    await site.until()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hand_off(site.a, site.b, 9)
    assert from_rpc_error(caught.value).code is grpc.StatusCode.UNAVAILABLE


async def test_work_of_the_old_role_ends_first_or_the_role_stays(site: Site):
    for call, text in (
        (site.operator.stub.Drain(pb.DrainRequest(instance_id="z")), "no instance z"),
        (site.operator.stub.SetRole(pb.SetRoleRequest(instance_id="a", role=99)), "role"),  # type: ignore[arg-type]
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=text):
            await call
    prompt = [65] * 40
    answers = [one async for one in site.a.stub.Generate(leg(prompt, 6, kind=CONTEXT), timeout=30)]
    params = answers[-1].context_ready.params  # held
    await site.set_role("a", TO_GENERATION, deadline_s=0)
    while not (refused := {one.refused for one in (await site.operator.cluster()).members} - {""}):
        await asyncio.sleep(0.02)
    assert "work of role CONTEXT was open" in refused.pop()
    await site.set_role("a", TO_GENERATION)
    await asyncio.sleep(0.2)
    second = leg(prompt, 6, kind=GENERATION, params=params)
    assert tokens([one async for one in site.b.stub.Generate(second, timeout=30)])
    await site.until()


async def test_what_an_instance_caches_is_known_until_an_ordered_drain_ends_it(site: Site):
    await hand_off(site.a, site.b, 1)
    keying = (await site.operator.cluster()).members[0].instance.keying
    ours = Keying(keying.weights_digest, keying.attention_digest, keying.kv_dtype, keying.tokens_per_block)
    prompt = array("I", [32 + (1 + at) % 95 for at in range(40)]).tobytes()
    keys = b"".join(chain(ours.root(b""), prompt, ours.tokens_per_block))
    a, b = (site.cluster.get(name) for name in ("a", "b"))
    assert a is not None
    assert b is not None
    while list(site.cluster.index.reuse(keys, 2)) != [len(keys) // 16] * 2:
        await asyncio.sleep(0.02)
    await site.operator.stub.Drain(pb.DrainRequest(instance_id="a", deadline=Duration(seconds=20)))
    assert await site.a.exit_code() == 0
    while site.cluster.get("a") is not None:
        await asyncio.sleep(0.02)
    assert not site.cluster.index.blocks(a.number)
    assert site.cluster.index.reuse(keys, 2)[b.number] == len(keys) // 16
