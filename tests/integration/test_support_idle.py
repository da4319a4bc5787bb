"""The proof of emptiness proves something: whatever a cluster still holds is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from isthmus.v1 import (
    coordinator_service_pb2,
    coordinator_service_pb2_grpc,
    kv_transfer_service_pb2,
    kv_transfer_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

from cluster import assert_idle
from isthmus_client.plan import ProcessSpec
from isthmus_client.supervisor import LocalCluster
from isthmus_core.rpc import RpcServer

pytestmark = pytest.mark.integration


class _Everything(
    coordinator_service_pb2_grpc.CoordinatorServiceServicer,
    worker_service_pb2_grpc.WorkerServiceServicer,
    kv_transfer_service_pb2_grpc.KvTransferServiceServicer,
):
    """Coordinator and worker in one, each with an answer that the test can spoil."""

    def __init__(self) -> None:
        self.cluster = coordinator_service_pb2.GetClusterResponse()
        self.cluster.members.add().instance.instance_id = "context-0"
        self.status = worker_service_pb2.GetStatusResponse(role=1)
        self.sessions = kv_transfer_service_pb2.ListSessionsResponse(free_pages=8, total_pages=8)

    async def GetCluster(self, request, context):
        return self.cluster

    async def GetStatus(self, request, context):
        return self.status

    async def ListSessions(self, request, context):
        return self.sessions


@dataclass
class _Process:
    running: bool


@dataclass
class _Cluster:
    specs: list[ProcessSpec]
    running: bool = True

    def process(self, name: str) -> _Process:
        return _Process(self.running)


@pytest.fixture(name="fake")
async def _fake():
    server, servicer = RpcServer(), _Everything()
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.server)
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(servicer, server.server)
    address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    specs = [ProcessSpec(name, "module", {}, address) for name in ("coordinator", "context-0", "router")]
    yield servicer, cast("LocalCluster", _Cluster(specs))
    await server.stop(0)


async def test_an_empty_cluster_is_idle(fake):
    _, cluster = fake
    await assert_idle(cluster, timeout_s=0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda fake: setattr(fake.cluster, "open_requests", 2), "coordinator: 2 open requests"),
        (lambda fake: setattr(fake.cluster.members[0], "open_requests", 1), "1 open requests on context-0"),
        (lambda fake: setattr(fake.status.load, "held_handoffs", 3), "context-0: held_handoffs = 3"),
        (lambda fake: setattr(fake.status.load, "used_blocks", 4), "context-0: used_blocks = 4"),
        (lambda fake: setattr(fake.status.load, "in_doubt_blocks", 5), "context-0: in_doubt_blocks = 5"),
        (lambda fake: setattr(fake.sessions, "free_pages", 7), "7 of 8 pages free"),
        (lambda fake: setattr(fake.sessions, "open_requests", 1), "context-0: 1 open requests"),
        (lambda fake: fake.sessions.sessions.add(), "context-0: session"),
    ],
)
async def test_whatever_is_left_is_named(fake, spoil, words: str):
    servicer, cluster = fake
    spoil(servicer)
    with pytest.raises(AssertionError, match=words):
        await assert_idle(cluster, timeout_s=0)


async def test_a_process_that_has_ended_holds_nothing(fake):
    servicer, cluster = fake
    servicer.status.load.used_blocks = 4
    cluster.running = False
    await assert_idle(cluster, timeout_s=0)
