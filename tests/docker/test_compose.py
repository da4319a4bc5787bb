"""`docker compose up` as a user runs it: a real model split in two containers, its trace, its metrics, its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from compose import ROOT, SERVICES, Project, docker
from isthmus_core.process import free_port
from isthmus_worker.fetch_model import fetch_model
from otlp import OtlpReceiver

pytestmark = [pytest.mark.timeout(560), pytest.mark.asyncio(loop_scope="module")]

QUESTION: dict[str, Any] = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 12,
    "temperature": 0,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="receiver")
async def _receiver() -> AsyncGenerator[OtlpReceiver, None]:
    async with OtlpReceiver(host="0.0.0.0") as receiver:
        yield receiver


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="project")
async def _project(receiver: OtlpReceiver) -> AsyncGenerator[Project, None]:
    model = await asyncio.to_thread(fetch_model)
    project = Project(
        "isthmus-test",
        {
            "COMPOSE_PROFILES": "",
            "DOCKER_BUILDKIT": "1",
            "REVISION": "tested",
            "MODEL_PATH": str(model),
            "OTLP_ENDPOINT": f"http://host.docker.internal:{receiver.port}",
            "HTTP_PORT": str(free_port()),
            "GRPC_PORT": str(free_port()),
            "ENGINE_THREADS": "1",
            "START_PERIOD": "90s",
            "DTYPE": "float32",
            "KV_CACHE_BYTES": str(256 << 20),
        },
    )
    try:
        await asyncio.to_thread(project.compose, "up", "--build", "--wait")
        yield project
    finally:
        await asyncio.to_thread(project.compose, "down", "--volumes", "--timeout", "30")
    assert project.leftovers() == []


async def ask(project: Project, timeout_s: float = 60) -> str:
    """The answer through the published port."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{project.environment['HTTP_PORT']}") as client:
        answer = await client.post("/v1/chat/completions", json=QUESTION, timeout=timeout_s)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_a_question_is_answered(project: Project):
    assert "Paris" in await ask(project)


async def test_its_trace_has_every_service(project: Project, receiver: OtlpReceiver):
    receiver.spans.clear()
    await ask(project)

    wanted = {"isthmus-router", "isthmus-coordinator", "context", "generation"}

    def whole() -> bool:
        by_trace: dict[str, set[str]] = {}
        for span in receiver.spans:
            # Of a worker its name: both have to be there.
            worker = span.service == "isthmus-worker"
            who = str(span.resource["service.instance.id"]) if worker else span.service
            by_trace.setdefault(span.trace_id, set()).add(who)
        return any(wanted <= one for one in by_trace.values())

    async with asyncio.timeout(30):
        while not whole():
            await asyncio.sleep(0.2)


async def test_images_are_what_they_promise(project: Project):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for service in SERVICES:
        about = project.inspect(service)
        assert about["Config"]["User"] == "10001:10001"
        assert about["HostConfig"]["ReadonlyRootfs"]
        assert about["HostConfig"]["CapDrop"] == ["ALL"]
        assert about["Config"]["StopSignal"] == "SIGTERM"
        labels = {key.rpartition(".")[2]: value for key, value in about["Config"]["Labels"].items()}
        assert labels["title"] == f"isthmus-{'worker' if service in ('context', 'generation') else service}"
        assert labels["licenses"] == "Apache-2.0"
        assert labels["revision"] == "tested"
        # A bill of materials can be read off every image: each package has its metadata, in the version that is pinned.
        inside = json.loads(project.compose("exec", "-T", service, "python3", "-m", "pip", "inspect", "--local"))
        installed = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in inside["installed"]}
        assert installed["grpcio"] == pinned["grpcio"]
        assert "isthmus-core" in installed
    for service in ("coordinator", "router"):
        listed = project.compose(
            "exec",
            "-T",
            service,
            "python3",
            "-c",
            "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('nixl'))",
        )
        assert listed.split() == ["None", "None"], service


async def test_prometheus_scrapes_every_service(project: Project):
    """Debian's Prometheus, in the project's network, with the configuration that is shipped."""
    network = f"{project.name}_default"
    port = free_port()
    name = f"{project.name}-prometheus"
    volumes = (f"{ROOT}/deploy/observability:/etc/prometheus:ro", "/usr/bin/prometheus:/usr/bin/prometheus:ro")
    mounts = [word for volume in volumes for word in ("--volume", volume)]
    place = ["--name", name, "--network", network, "--publish", f"127.0.0.1:{port}:9090"]
    settings = ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/tmp/data"]
    docker("run", "--detach", "--rm", *place, *mounts, "python:3.11-slim", "/usr/bin/prometheus", *settings)
    try:
        await ask(project)

        def query(text: str) -> list[dict[str, Any]]:
            answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": text}, timeout=5)
            return answer.raise_for_status().json()["data"]["result"]

        async def seen(text: str, count: int) -> None:
            async with asyncio.timeout(60):
                while True:
                    try:
                        if len(await asyncio.to_thread(query, text)) >= count:
                            return
                    except httpx.HTTPError:
                        pass  # it is still starting
                    await asyncio.sleep(0.5)

        await seen("up == 1", 4)
        await seen('{__name__=~"isthmus_.*time_to_first_token.*_count"} > 0', 1)
    finally:
        docker("rm", "--force", name)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_killed_service_comes_back(project: Project, service: str):
    docker("kill", project.container(service))
    await asyncio.to_thread(project.compose, "up", "--wait")
    async with asyncio.timeout(90):
        while True:
            try:
                if "Paris" in await ask(project):
                    return
            except httpx.HTTPError:
                await asyncio.sleep(0.5)  # the pair meets again


async def test_stopping_is_graceful(project: Project):
    await asyncio.to_thread(project.compose, "stop", "--timeout", "30")
    for service in SERVICES:
        assert project.inspect(service)["State"]["ExitCode"] == 0, service
    await asyncio.to_thread(project.compose, "up", "--wait")
    assert "Paris" in await ask(project)
