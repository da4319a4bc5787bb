"""The supervisor with stand-ins for the services: start, failure, restart, stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from isthmus_client.plan import ClusterOptions
from isthmus_client.runs import create_run
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import ChildFailed, LocalCluster, choose_ports
from isthmus_core.errors import StartError

pytestmark = pytest.mark.integration

# Serves health on its address (and /health for the router), notes what happens to it, fails when a file says so.
SERVICE = """
import asyncio, os, sys
from pathlib import Path
from isthmus_core.rpc import RpcServer
from isthmus_core.service import run_service

NAME, FOLDER = "{name}", Path(os.environ["STAND_IN"])


async def http(reader, writer):
    await reader.readline()
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
    writer.close()


async def main(context):
    me = context.config.worker.instance_id if NAME == "worker" else NAME
    fault = FOLDER / f"{{me}}.fault"
    if fault.exists():
        print(f"stand-in: {{fault.read_text()}}", file=sys.stderr)
        return 3
    address = getattr(context.config, NAME).listen
    server = RpcServer()
    await server.start(address)
    web = None
    if NAME == "router":
        host, port = context.config.router.http_listen.split(":")
        web = await asyncio.start_server(http, host, int(port))
    await server.set_serving(not (FOLDER / f"{{me}}.silent").exists())
    with (FOLDER / "events").open("a") as file:
        file.write(f"up {{me}} {{sys.argv[1:]}}\\n")
    await context.stopping.wait()
    with (FOLDER / "events").open("a") as file:
        file.write(f"down {{me}}\\n")
    await server.stop(0)
    if web:
        web.close()
    return 0


run_service(NAME, "stand-in", main)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("coordinator", "router", "worker"):
        package = tmp_path / f"isthmus_{name}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(SERVICE.format(name=name))
    return tmp_path


def _cluster(folder: Path, said: list[str], *, restart: bool = True) -> LocalCluster:
    options = ClusterOptions(context=1, generation=1, engine="mock")
    run = create_run(None, folder / "runs")
    environment = {"PYTHONPATH": str(folder), "STAND_IN": str(folder)}
    return LocalCluster(options, choose_ports(2), run, report=said.append, environment=environment, restart=restart)


def _events(folder: Path) -> list[str]:
    path = folder / "events"
    return path.read_text().splitlines() if path.exists() else []


def _pids(cluster: LocalCluster) -> list[int]:
    return [cluster.process(spec.name).pid for spec in cluster.specs]


async def test_it_serves_then_stops_router_first_coordinator_last(folder: Path):
    cluster = _cluster(folder, [])
    await cluster.start(30)
    pids = _pids(cluster)
    assert len([line for line in _events(folder) if line.startswith("up")]) == 4
    codes = await cluster.stop()
    assert codes == dict.fromkeys(("router", "context-0", "generation-0", "coordinator"), 0)
    downs = [line for line in _events(folder) if line.startswith("down")]
    assert downs[0] == "down router"
    assert downs[-1] == "down coordinator"
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_the_reason_of_a_failed_start_is_reported_with_its_exit_code(folder: Path):
    (folder / "generation-0.fault").write_text("the disk is full")
    cluster = _cluster(folder, [])
    try:
        with pytest.raises(ChildFailed, match="generation-0 ended with code 3: stand-in: the disk is full") as caught:
            await cluster.start(30)
        assert caught.value.exit_code == 3
    finally:
        await cluster.stop()
    assert not any(psutil.pid_exists(pid) for pid in _pids(cluster))


async def test_a_cluster_that_never_serves_names_who_is_late(folder: Path):
    (folder / "context-0.silent").touch()
    cluster = _cluster(folder, [])
    try:
        with pytest.raises(StartError, match="not ready after 8 s: context-0"):
            await cluster.start(8)
    finally:
        await cluster.stop()


async def test_a_dead_worker_is_started_again(folder: Path):
    said: list[str] = []
    cluster = _cluster(folder, said)
    stopping = asyncio.Event()
    await cluster.start(30)
    keeping = asyncio.create_task(cluster.supervise(stopping))
    try:
        old = cluster.process("context-0").pid
        os.kill(old, signal.SIGKILL)
        while sum(line.startswith("up context-0") for line in _events(folder)) < 2:
            assert not keeping.done()
            await asyncio.sleep(0.05)
        assert cluster.process("context-0").pid != old
        assert any("context-0 ended with signal SIGKILL" in line for line in said)
        stopping.set()
        await keeping
    finally:
        await cluster.stop()


async def test_only_the_first_coordinator_may_grant_ids_at_once(folder: Path):
    cluster = _cluster(folder, [])
    await cluster.start(30)
    try:
        child = cluster.process("coordinator")
        child.signal(signal.SIGKILL)
        await child.wait()
        await cluster.restart("coordinator")
        while sum(line.startswith("up coordinator") for line in _events(folder)) < 2:
            await asyncio.sleep(0.05)
        first, second = (line for line in _events(folder) if line.startswith("up coordinator"))
        assert "coordinator.id_grace_s=0" in first
        assert "coordinator.id_grace_s=0" not in second
    finally:
        await cluster.stop()


async def test_without_restart_a_death_ends_supervision(folder: Path):
    cluster = _cluster(folder, [], restart=False)
    await cluster.start(30)
    try:
        cluster.process("router").signal(signal.SIGKILL)
        with pytest.raises(ChildFailed, match="router ended with signal SIGKILL") as caught:
            await cluster.supervise(asyncio.Event())
        assert caught.value.exit_code == 1
    finally:
        await cluster.stop()


async def test_a_signal_ends_the_command_in_order(folder: Path):
    cluster = _cluster(folder, [])

    async def body(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stopping.wait()

    await run_cluster(cluster, body, start_timeout_s=30)
    assert [line for line in _events(folder) if line.startswith("down")][-1] == "down coordinator"


async def test_a_signal_during_the_start_stops_everything(folder: Path):
    (folder / "router.silent").touch()
    cluster = _cluster(folder, [])
    asyncio.get_running_loop().call_later(2.0, os.kill, os.getpid(), signal.SIGINT)

    async def body(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        raise AssertionError("must not be reached")

    await run_cluster(cluster, body, start_timeout_s=30)
    assert not any(psutil.pid_exists(pid) for pid in _pids(cluster))
