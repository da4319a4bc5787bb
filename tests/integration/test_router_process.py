"""The router as a process: start-up refusals with their exit codes, and a life from start to SIGTERM beside a real
coordinator and a worker that registers with it."""

import asyncio
import signal
import socket
from pathlib import Path

import httpx
import pytest
from isthmus.v1 import coordinator_service_pb2 as coordinator_pb
from isthmus.v1 import inference_service_pb2 as pb
from isthmus.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from isthmus.v1.inference_service_pb2_grpc import InferenceServiceStub

from isthmus_core.process import free_port
from isthmus_core.rpc import open_channel, wait_serving
from router_service import RegisteringWorker, service

pytestmark = pytest.mark.integration
BYTE_MODEL = ("model.tokenizer=byte", "model.name=m")


async def router_fails(*overrides: str) -> tuple[int | None, str]:
    async with service("isthmus_router", *overrides) as process:
        _, stderr = await process.communicate()
        return process.returncode, stderr.decode()


def addresses(grpc_port: int, http_port: int, coordinator_port: int) -> tuple[str, ...]:
    return (
        f"router.listen=127.0.0.1:{grpc_port}",
        f"router.http_listen=127.0.0.1:{http_port}",
        f"router.coordinator=127.0.0.1:{coordinator_port}",
    )


async def test_wrong_settings_exit_2_and_say_what_to_write() -> None:
    code, stderr = await router_fails(*addresses(free_port(), free_port(), free_port()), "model.name=m")
    assert code == 2
    assert "model.path" in stderr


@pytest.mark.parametrize("field", ["router.listen", "router.http_listen"])
async def test_taken_ports_exit_3_before_anything_else(field: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ports = (port, free_port()) if field == "router.listen" else (free_port(), port)
        code, stderr = await router_fails(*addresses(*ports, free_port()), *BYTE_MODEL)
    assert code == 3
    assert f"{field} = 127.0.0.1:{port}" in stderr


async def test_an_absent_coordinator_exits_3_after_the_start_timeout() -> None:
    missing = free_port()
    where = addresses(free_port(), free_port(), missing)
    code, stderr = await router_fails(*where, *BYTE_MODEL, "router.start_timeout_s=0.5")
    assert code == 3
    assert str(missing) in stderr


async def open_requests(coordinator: str) -> int:
    channel = open_channel(coordinator)
    try:
        cluster = await CoordinatorServiceStub(channel).GetCluster(coordinator_pb.GetClusterRequest())
        return cluster.open_requests
    finally:
        await channel.close()


async def test_a_routers_life_beside_a_real_coordinator() -> None:
    coordinator_port, grpc_port, http_port = free_port(), free_port(), free_port()
    coordinator, url = f"127.0.0.1:{coordinator_port}", f"http://127.0.0.1:{http_port}"
    where = addresses(grpc_port, http_port, coordinator_port)
    member = RegisteringWorker(coordinator)
    async with (
        service("isthmus_coordinator", f"coordinator.listen={coordinator}", "coordinator.id_grace_s=0") as _,
        service("isthmus_router", *where, *BYTE_MODEL, "router.drain_s=5") as router,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        assert await wait_serving(coordinator, 20)
        while True:  # the HTTP port opens once the coordinator has answered
            try:
                health = await http.get("/health")
                break
            except httpx.TransportError:
                await asyncio.sleep(0.05)
        assert health.status_code == 503
        assert "serves m" in health.json()["missing"][0]
        refused = await http.post("/v1/completions", json={"prompt": "olleh"})
        assert refused.status_code == 503

        await member.join()
        assert await wait_serving(f"127.0.0.1:{grpc_port}", 20, service="isthmus.v1.InferenceService")
        answer = await http.post("/v1/completions", json={"prompt": "olleh"})
        assert answer.json()["choices"][0]["text"] == "hello"

        channel = open_channel(f"127.0.0.1:{grpc_port}")
        request = pb.InferenceServiceGenerateRequest(prompt="olleh")
        texts = [part.text async for part in InferenceServiceStub(channel).Generate(request)]
        assert "".join(texts) == "hello"
        await channel.close()

        loaded = Path(f"/proc/{router.pid}/maps").read_text()
        assert not [name for name in ("libtorch", "nixl", "libucp") if name in loaded]

        # A stream that runs when the router is asked to stop ends as its client expects.
        member.servicer.hang_after = 1
        async with http.stream("POST", "/v1/completions", json={"prompt": "olleh", "stream": True}) as stream:
            await member.servicer.hanging.wait()
            assert await open_requests(coordinator) == 1
            assert stream.status_code == 200
        while await open_requests(coordinator):
            await asyncio.sleep(0.05)
        router.send_signal(signal.SIGTERM)
        await router.communicate()
        assert router.returncode == 0
    await member.leave()
