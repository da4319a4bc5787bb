"""Whole clusters of real processes for tests, and the proof that one holds nothing any more."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from isthmus.v1 import (
    coordinator_service_pb2,
    coordinator_service_pb2_grpc,
    kv_transfer_service_pb2,
    kv_transfer_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

from isthmus_client.plan import ClusterOptions
from isthmus_client.runs import create_run
from isthmus_client.supervisor import LocalCluster, choose_ports
from isthmus_core.rpc import open_channel

MOCK = ClusterOptions(context=1, generation=1, engine="mock")


@asynccontextmanager
async def running_cluster(
    options: ClusterOptions,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    restart: bool = False,
    start_timeout_s: float = 90.0,
    clean: bool = True,
) -> AsyncGenerator[LocalCluster, None]:
    """A cluster that serves. Stopped at the end; with `clean` every process must then have left with code 0.

    When the body fails the ends of all logs are printed.
    """
    run = create_run(None, folder / "runs")
    ports = choose_ports(len(options.workers))
    # pytest captures what is printed by `report`.
    cluster = LocalCluster(options, ports, run, report=print, environment=environment, restart=restart)
    try:
        await cluster.start(start_timeout_s)
        yield cluster
    except BaseException:
        print_logs(cluster)
        await cluster.stop()
        raise
    codes = await cluster.stop()
    if clean and any(codes.values()):
        print_logs(cluster)
        raise AssertionError(f"exit codes {codes}")


def print_logs(cluster: LocalCluster, lines: int = 30) -> None:
    """The last lines of every process."""
    for spec in cluster.specs:
        path = cluster.process(spec.name).log_path
        tail = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else ["no log"]
        print(f"--- {spec.name}", *tail, sep="\n", file=sys.stderr)


async def _coordinator_leftovers(endpoint: str) -> list[str]:
    async with open_channel(endpoint) as channel:
        stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
        state = await stub.GetCluster(coordinator_service_pb2.GetClusterRequest(), timeout=10)
    left = [f"coordinator: {state.open_requests} open requests"] if state.open_requests else []
    for member in state.members:
        if member.open_requests:
            left.append(f"coordinator: {member.open_requests} open requests on {member.instance.instance_id}")
    return left


async def _worker_leftovers(name: str, endpoint: str) -> list[str]:
    async with open_channel(endpoint) as channel:
        worker = worker_service_pb2_grpc.WorkerServiceStub(channel)
        status = await worker.GetStatus(worker_service_pb2.GetStatusRequest(), timeout=10)
        left: list[str] = []
        load = status.load
        for field in ("running_requests", "waiting_requests", "held_handoffs", "used_blocks", "in_doubt_blocks"):
            if count := getattr(load, field):
                left.append(f"{name}: {field} = {count}")
        if status.open_spans:
            left.append(f"{name}: open_spans = {status.open_spans}")
        if status.role == 3:  # an instance that does both hands nothing off and has no transfer service
            return left
        transfer = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
        sessions = await transfer.ListSessions(kv_transfer_service_pb2.ListSessionsRequest(), timeout=10)
    left += [f"{name}: session {str(session).strip()!r}" for session in sessions.sessions]
    if sessions.free_pages != sessions.total_pages:
        left.append(f"{name}: {sessions.free_pages} of {sessions.total_pages} pages free")
    if sessions.open_requests:
        left.append(f"{name}: {sessions.open_requests} open requests")
    return left


async def leftovers(cluster: LocalCluster) -> list[str]:
    """Everything the cluster still holds for some request, one line each. Processes that have ended hold nothing."""
    left: list[str] = []
    for spec in cluster.specs:
        if not cluster.process(spec.name).running:
            continue
        try:
            if spec.name == "coordinator":
                left += await _coordinator_leftovers(spec.address)
            elif spec.name != "router":
                left += await _worker_leftovers(spec.name, spec.address)
        except grpc.aio.AioRpcError as error:
            left.append(f"{spec.name}: {error.code().name} {error.details()}")
    return left


async def assert_idle(cluster: LocalCluster, timeout_s: float = 20.0) -> None:
    """Prove that nothing is left: no open request, placement, session, hold, span; every page free.

    What is under way may take `timeout_s` seconds to settle; AssertionError lists what is left then.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while left := await leftovers(cluster):
        if loop.time() > deadline:
            raise AssertionError(f"not idle after {timeout_s:g} s:\n" + "\n".join(left))
        await asyncio.sleep(0.05)
