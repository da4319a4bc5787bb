"""Every command that asks a cluster, against one whose hops are all authenticated, each with the role it needs."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToJson
from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc

from cluster import MOCK, running_cluster
from command import isthmus
from isthmus_client.certificates import Authority
from isthmus_client.supervisor import LocalCluster
from isthmus_core.config import TlsConfig
from isthmus_core.roles import Role
from isthmus_core.rpc import open_channel
from mock_oracle import oracle

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@dataclass(frozen=True, slots=True)
class Secured:
    """A cluster and the folder of its certificates."""

    cluster: LocalCluster
    certificates: Path

    async def run(self, role: str, *arguments: str) -> tuple[int, str]:
        """A command with the certificate of a role."""
        files = {"CA": "ca.crt", "CERT": f"{role}.crt", "KEY": f"{role}.key"}
        environment = {f"ISTHMUS_TLS_{key}": str(self.certificates / name) for key, name in files.items()}
        return await isthmus(*arguments, environment={**os.environ, **environment})

    async def ask(self, role: str, *arguments: str) -> Any:
        """Its JSON."""
        code, output = await self.run(role, *arguments, "--json")
        assert code == 0, output
        return json.loads(output)

    def worker(self, kind: str) -> str:
        """Address of a worker."""
        return next(spec.address for spec in self.cluster.specs if spec.name.startswith(kind))

    @property
    def coordinator(self) -> tuple[str, str]:
        """The option."""
        return "--coordinator", self.cluster.coordinator_endpoint


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="secured")
async def _secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Secured, None]:
    folder = tmp_path_factory.mktemp("certs")
    authority = Authority.open(folder, 1)
    authority.issue_roles(["127.0.0.1"], 1)
    # Processes of a local cluster share one file of settings, so one certificate has the roles of all three.
    authority.issue("fleet", [Role.ROUTER, Role.COORDINATOR, Role.WORKER], ["127.0.0.1"], 1)
    tls = {"ca": str(folder / "ca.crt"), "cert": str(folder / "fleet.crt"), "key": str(folder / "fleet.key")}
    options = replace(MOCK, base={"tls": tls, "engine": {"mock": {"decode_us": 2000}}})
    async with running_cluster(options, tmp_path_factory.mktemp("cluster")) as cluster:
        yield Secured(cluster, folder)


async def test_a_client_talks_and_an_operator_sees_the_story(secured: Secured):
    endpoint = ("--endpoint", secured.cluster.grpc_endpoint)
    answer = await secured.ask(
        "client", "generate", "hello", "--raw", "--max-tokens", "8", "--temperature", "0", *endpoint
    )
    assert answer["token_ids"] == oracle(list(b"hello"), 8)
    request = str(answer["request_id"])
    legs = await secured.ask("operator", "trace", request, *secured.coordinator)
    assert [leg["leg"] for leg in legs] == ["context", "generation"]
    code, drawn = await secured.run("operator", "trace", request, *secured.coordinator)
    assert code == 0, drawn
    assert "receive" in drawn
    code, message = await secured.run("operator", "trace", "12345", *secured.coordinator)
    assert (code, "no worker remembers" in message) == (1, True)


async def test_the_cluster_is_shown(secured: Secured):
    members = (await secured.ask("operator", "cluster", *secured.coordinator))["members"]
    assert sorted(one["instance"]["instance_id"] for one in members) == ["context-0", "generation-0"]
    look = await secured.ask("operator", "top", "--count", "1", *secured.coordinator)
    assert sorted(look["sessions"]) == ["context-0", "generation-0"]
    code, screen = await secured.run("operator", "top", "--count", "2", "--interval", "0.2", *secured.coordinator)
    assert code == 0, screen
    assert "1 of 1 pairs ready" in screen


async def test_pairs_are_planned_and_measured(secured: Secured, tmp_path: Path):
    context, generation = secured.worker("context"), secured.worker("generation")
    online = await secured.ask("operator", "plan", "--from", context, "--to", generation, "--tokens", "64")
    assert online["compatible"]
    files = [tmp_path / "context.json", tmp_path / "generation.json"]
    folder = secured.certificates
    worker = TlsConfig(ca=folder / "ca.crt", cert=folder / "worker.crt", key=folder / "worker.key")
    for file, address in zip(files, (context, generation), strict=True):
        async with open_channel(address, worker) as channel:
            stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
            file.write_text(MessageToJson(await stub.GetInstanceInfo(kv_transfer_service_pb2.GetInstanceInfoRequest())))
    offline = await secured.ask("client", "plan", "--from", str(files[0]), "--to", str(files[1]), "--tokens", "64")
    assert (offline["bytes"], offline["explanation"]) == (online["bytes"], online["explanation"])
    files[1].write_text("{}")
    code, message = await secured.run("client", "plan", "--from", str(files[0]), "--to", str(files[1]))
    assert (code, "generation.json" in message) == (2, True)
    (matrix,) = await secured.ask("operator", "probe", *secured.coordinator)
    assert matrix["pairs"][0]["path"].startswith("nixl/ucx")
    code, table = await secured.run("operator", "probe", *secured.coordinator)
    assert code == 0
    assert "GB/s" in table


async def test_load_is_sent_and_two_runs_are_compared(secured: Secured, tmp_path: Path):
    common = ("--requests", "12", "--rate", "100", "--isl", "uniform:20-60", "--osl", "6", "--warmup", "1")
    common += ("--endpoint", secured.cluster.grpc_endpoint, "--ttft-slo", "5000")
    saved, page = tmp_path / "run.json", tmp_path / "run.html"
    figures = await secured.ask("client", "bench", *common, "--save", str(saved), "--report", str(page))
    assert (figures["requests"], figures["failed"], figures["attainment"]) == (12, 0, 1.0)
    assert all(one["output_tokens"] == 6 for one in json.loads(saved.read_text())["requests"])
    assert page.read_text().count("<svg") == 4
    code, table = await secured.run("client", "bench", *common, "--compare", str(saved))
    assert code == 0, table
    assert "change" in table


@pytest.mark.parametrize(
    "arguments", [("drain", "context-0"), ("role", "context-0", "generation"), ("cluster",), ("top", "--count", "1")]
)
async def test_a_client_may_not_operate(secured: Secured, arguments: tuple[str, ...]):
    code, message = await secured.run("client", *arguments, *secured.coordinator)
    assert code == 1
    assert "PERMISSION_DENIED" in message
    assert "Traceback" not in message


async def test_orders_of_an_operator_are_carried_out_last(secured: Secured):
    code, message = await secured.run("operator", "drain", "nobody", *secured.coordinator)
    assert code == 1
    assert "nobody" in message
    code, message = await secured.run("operator", "drain", "context-0", "--deadline", "5", *secured.coordinator)
    assert code == 0, message
