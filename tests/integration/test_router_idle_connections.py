"""Ten thousand clients that say nothing: the router keeps them cheaply and serves the others."""

from __future__ import annotations

import asyncio
import resource

import httpx
import psutil
import pytest

from isthmus_core.process import free_port
from isthmus_core.rpc import wait_serving
from router_service import RegisteringWorker, service

CONNECTIONS = 10_000
# Per connection: protocol, parser, buffers.
MOST_BYTES = 40_000


@pytest.mark.nightly
@pytest.mark.timeout(240)
async def test_ten_thousand_idle_connections() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < CONNECTIONS + 1000:
        pytest.skip(f"{hard} open files are allowed here: NOT tested with {CONNECTIONS} connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (CONNECTIONS + 1000, hard))
    grpc, http, coordinator = free_port(), free_port(), free_port()
    settings = (
        f"router.listen=127.0.0.1:{grpc}",
        f"router.http_listen=127.0.0.1:{http}",
        f"coordinator.listen=127.0.0.1:{coordinator}",
        "router.coordinator=embedded",
        "coordinator.id_grace_s=0",
        "model.tokenizer=byte",
        "model.name=m",
        f"router.max_connections={CONNECTIONS + 100}",
        "router.client_timeout_s=200",
    )
    member = RegisteringWorker(f"127.0.0.1:{coordinator}")
    opened: list[asyncio.StreamWriter] = []
    try:
        async with service("isthmus_router", *settings) as router:
            assert await wait_serving(f"127.0.0.1:{coordinator}", 60)
            await member.join()
            assert await wait_serving(f"127.0.0.1:{grpc}", 60, service="isthmus.v1.InferenceService")
            before = psutil.Process(router.pid).memory_info().rss
            for _ in range(CONNECTIONS // 100):
                pairs = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", http) for _ in range(100)))
                opened.extend(writer for _, writer in pairs)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}", trust_env=False, timeout=60) as client:
                answer = await client.post("/v1/completions", json={"prompt": "olleh"})
                assert answer.json()["choices"][0]["text"] == "hello"
            grown = psutil.Process(router.pid).memory_info().rss - before
            assert grown < CONNECTIONS * MOST_BYTES, f"{grown / CONNECTIONS:.0f} bytes a connection"
            print(f"{grown / CONNECTIONS:.0f} bytes a connection")
    finally:
        for writer in opened:
            writer.close()
        await member.leave()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
