"""A router fleet: processes that share the public ports, under a parent that keeps them alive and answers for them."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

from isthmus_core.errors import InternalError, StartError
from isthmus_core.process import free_port
from isthmus_core.rpc import wait_serving
from isthmus_router.fleet.ports import ReservedPort
from isthmus_router.fleet.status import MOST_DEATHS, Status, health, restart_pause_s
from router_service import RegisteringWorker, service

BYTE_MODEL = ("model.tokenizer=byte", "model.name=m")
GRPC, HTTP, CONTROL, COORDINATOR = range(4)


class Site:
    """Addresses of a fleet with its implicit coordinator."""

    def __init__(self) -> None:
        self.ports = [free_port() for _ in range(4)]
        names = ("router.listen", "router.http_listen", "router.control_listen", "coordinator.listen")
        where = [f"{name}=127.0.0.1:{port}" for name, port in zip(names, self.ports, strict=True)]
        self.settings = (*where, "router.coordinator=embedded", "router.num_workers=2", *BYTE_MODEL, "router.drain_s=5")
        self.settings += ("coordinator.id_grace_s=0",)

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"


@asynccontextmanager
async def fleet() -> AsyncGenerator[tuple[Site, Process, httpx.AsyncClient], None]:
    """A fleet of two with a worker, serving."""
    site = Site()
    member = RegisteringWorker(f"127.0.0.1:{site.ports[COORDINATOR]}")
    async with (
        service("isthmus_router", *site.settings) as parent,
        httpx.AsyncClient(base_url=site.url(CONTROL), trust_env=False, timeout=20) as control,
    ):
        assert await wait_serving(f"127.0.0.1:{site.ports[COORDINATOR]}", 40)
        await member.join()
        async with asyncio.timeout(40):
            while await serving(control) < 2:
                await asyncio.sleep(0.05)
        yield site, parent, control
    await member.leave()


async def serving(control: httpx.AsyncClient) -> int:
    try:
        body = (await control.get("/health")).json()
    except httpx.TransportError:
        return 0
    return sum(row["status"] == "ok" for row in body["processes"].values())


async def ask(site: Site) -> str:
    """Over a connection of its own, which any of the processes may get."""
    async with httpx.AsyncClient(base_url=site.url(HTTP), trust_env=False, timeout=20) as http:
        answer = await http.post("/v1/completions", json={"prompt": "olleh"})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]


def routers(parent: Process) -> list[psutil.Process]:
    children = psutil.Process(parent.pid).children()
    return [child for child in children if "isthmus_router" in child.cmdline()]


async def test_a_fleets_life() -> None:
    async with fleet() as (site, parent, control):
        assert await asyncio.gather(*(ask(site) for _ in range(8))) == ["hello"] * 8
        metrics = (await control.get("/metrics")).text
        assert 'process="router-0"' in metrics
        assert 'process="router-1"' in metrics

        # Somebody else does not get the ports, not even to share them.
        code, stderr = await start_fails(*site.settings)
        assert code == 3
        assert f"router.listen = 127.0.0.1:{site.ports[GRPC]}" in stderr

        first, _ = routers(parent)
        os.kill(first.pid, signal.SIGKILL)
        first.wait(10)
        async with asyncio.timeout(40):
            while len(routers(parent)) < 2 or await serving(control) < 2:
                assert (await control.get("/health")).status_code == 200, "the other one serves"
                await asyncio.sleep(0.1)
        assert await asyncio.gather(*(ask(site) for _ in range(8))) == ["hello"] * 8

        assert (await control.post("/drain")).status_code == 202
        await asyncio.wait_for(parent.communicate(), 30)
        assert parent.returncode == 0


async def start_fails(*overrides: str) -> tuple[int | None, str]:
    async with service("isthmus_router", *overrides) as process:
        _, stderr = await process.communicate()
        return process.returncode, stderr.decode()


async def test_children_that_can_not_start_take_the_parent_with_them() -> None:
    site = Site()
    settings = [one for one in site.settings if not one.startswith("router.coordinator")]
    missing = free_port()
    code, stderr = await start_fails(*settings, f"router.coordinator=127.0.0.1:{missing}", "router.start_timeout_s=0.5")
    assert code == 3
    assert f"127.0.0.1:{missing} was not reached" in stderr


@pytest.mark.parametrize("policy", ["coordinator", "round_robin"])
async def test_one_process_with_the_coordinator_inside(policy: str) -> None:
    site = Site()
    member = RegisteringWorker(f"127.0.0.1:{site.ports[COORDINATOR]}")
    async with service("isthmus_router", *site.settings, "router.num_workers=1", f"router.policy={policy}") as router:
        assert await wait_serving(f"127.0.0.1:{site.ports[COORDINATOR]}", 40)
        await member.join()
        assert await wait_serving(f"127.0.0.1:{site.ports[GRPC]}", 20, service="isthmus.v1.InferenceService")
        assert await ask(site) == "hello"
        router.send_signal(signal.SIGTERM)
        await asyncio.wait_for(router.communicate(), 30)
        assert router.returncode == 0
    await member.leave()


def test_a_reserved_port_is_taken_for_everybody_else() -> None:
    with ReservedPort("127.0.0.1:0", "router.listen") as held:
        with pytest.raises(StartError, match=r"router\.listen"):
            ReservedPort(held.address, "router.listen")
    with ReservedPort(held.address, "router.listen") as again:
        assert again.port == held.port


def test_a_fleet_is_healthy_while_one_process_serves() -> None:
    good, bad = Status(()), Status(("nobody serves m",))
    assert health([("a", good), ("b", bad), ("c", None)], draining=False)[0] == 200
    assert health([("a", bad), ("b", None)], draining=False)[0] == 503
    assert health([("a", good)], draining=True)[0] == 503
    assert Status.parse(good.line()) == good
    with pytest.raises(InternalError):
        Status.parse(b"nonsense\n")


def test_dead_processes_come_back_slower_and_slower_and_then_not_at_all() -> None:
    pauses = [restart_pause_s(deaths) for deaths in range(1, MOST_DEATHS + 2)]
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert pauses[-2:] == [5.0, None]
