"""A cluster without a meeting place: workers know no coordinator, a router with one inside has them in its lists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from isthmus.v1 import coordinator_service_pb2 as pb

from isthmus_client import Client
from isthmus_client.client import get_cluster
from isthmus_coordinator.listed_members import listed_members
from isthmus_core.config_coordinator import MembersConfig
from isthmus_core.errors import ConfigError
from isthmus_core.process import free_port
from isthmus_core.rpc import wait_serving
from mock_oracle import oracle
from router_service import service
from worker_process import WorkerProcess, worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

PROMPT = [66, 67, 68] * 12


class Front:
    """A router process with the coordinator inside, at ports that stay."""

    def __init__(self, context: WorkerProcess, generation: WorkerProcess) -> None:
        self.grpc, self.coordinator = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.settings = (
            "router.coordinator=embedded",
            f"router.listen={self.grpc}",
            f"router.http_listen=127.0.0.1:{free_port()}",
            f"coordinator.listen={self.coordinator}",
            "coordinator.id_grace_s=0",
            f"coordinator.members.context=[{context.address}]",
            f"coordinator.members.generation=[{generation.address}]",
            "model.name=mock",
            "model.tokenizer=byte",
        )

    async def serves(self, *, gone: bytes = b"") -> bytes:
        """Wait until it does over the pair, without the incarnation `gone`, and look at the answer; the incarnation
        that generates."""
        assert await wait_serving(self.grpc, 40, service="isthmus.v1.InferenceService")
        # SERVING may still speak of an instance that is just leaving: ask only when the table has the new one.
        async with asyncio.timeout(40):
            while not (incarnation := await self._ready_generation()) or incarnation == gone:
                await asyncio.sleep(0.05)
        async with Client(self.grpc) as client:
            answer = await client.answer(PROMPT, max_tokens=12, timeout_s=20)
        assert list(answer.token_ids) == oracle(PROMPT, 12)
        return incarnation

    async def _ready_generation(self) -> bytes:
        """The incarnation that generates, of the only pair, once that is ready."""
        state = await get_cluster(self.coordinator, timeout_s=10)
        ready = [pair for pair in state.pairs if pair.state == pb.PAIR_STATE_READY]
        members = {member.instance.instance_id: member.instance.incarnation for member in state.members}
        return members["g"] if len(ready) == len(state.pairs) == 1 and set(members) == {"c", "g"} else b""


async def test_listed_instances_serve_and_are_found_again(tmp_path: Path):
    listed = "worker.coordinator=null"
    async with (
        worker(tmp_path, "unused:1", listed, "worker.role=context", "worker.instance_id=c") as context,
        worker(tmp_path, "unused:1", listed, "worker.role=generation", "worker.instance_id=g") as generation,
    ):
        front = Front(context, generation)
        async with service("isthmus_router", *front.settings):
            await front.serves()
            assert await context.serving()  # ready = member of a cluster
        # The first one was killed; the next one finds them, whole, and they it.
        async with service("isthmus_router", *front.settings):
            first = await front.serves()
            # One that starts anew is another start of the same instance.
            await generation.stop()
            again = worker(
                tmp_path, "unused:1", listed, "worker.role=generation", "worker.instance_id=g", port=generation.port
            )
            async with again:
                await front.serves(gone=first)
        await context.idle()


async def test_a_second_coordinator_and_a_wrong_role_are_refused_with_the_reason(tmp_path: Path):
    async with worker(
        tmp_path, "unused:1", "worker.coordinator=null", "worker.role=context_and_generation", "worker.instance_id=w"
    ) as one:
        first, second = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        both = f"coordinator.members.context_and_generation=[{one.address}]"
        async with (
            service("isthmus_coordinator", f"coordinator.listen={first}", both),
            service(
                "isthmus_coordinator", f"coordinator.listen={second}", f"coordinator.members.context=[{one.address}]"
            ) as wrong,
        ):
            async with asyncio.timeout(40):
                while not await members(first):
                    await asyncio.sleep(0.05)
                assert wrong.stderr is not None
                while b"list it at one coordinator only" not in (line := await wrong.stderr.readline()):
                    assert line, "it ended"
            assert await members(first) == ["w"]
        async with service(
            "isthmus_coordinator", f"coordinator.listen={second}", f"coordinator.members.context=[{one.address}]"
        ) as wrong:
            async with asyncio.timeout(40):
                assert wrong.stderr is not None
                while b"list it under context_and_generation" not in (line := await wrong.stderr.readline()):
                    assert line, "it ended"
            assert await members(second) == []


async def members(coordinator: str) -> list[str]:
    """Names; empty while nobody answers."""
    if not await wait_serving(coordinator, 20):
        return []
    state = await get_cluster(coordinator, timeout_s=10)
    return [member.instance.instance_id for member in state.members]


def test_lists_are_checked():
    with pytest.raises(ConfigError, match=r"coordinator\.members\.context = 'node': write host:port"):
        listed_members(MembersConfig(context=["node"]))
    with pytest.raises(ConfigError, match=r"coordinator\.members\.generation: a:1 is listed twice"):
        listed_members(MembersConfig(context=["a:1"], generation=["a:1"]))
