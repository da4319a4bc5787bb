"""Mutual TLS with real certificates: roles, expired and foreign ones, and files that change under a running server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc

from isthmus_client.certificates import Authority
from isthmus_core.config import TlsConfig
from isthmus_core.errors import ConfigError, IsthmusError
from isthmus_core.roles import Role
from isthmus_core.rpc import RpcServer, open_channel, wait_serving

pytestmark = pytest.mark.integration
HOSTS = ["localhost", "127.0.0.1"]
SECRET = kv_transfer_service_pb2.GetInstanceInfoRequest()


class Hub(kv_transfer_service_pb2_grpc.KvTransferServiceServicer):
    """Has something to hide."""

    async def GetInstanceInfo(self, request, context):  # type: ignore[no-untyped-def]
        return kv_transfer_service_pb2.GetInstanceInfoResponse()

    async def Connect(self, request_iterator, context):  # type: ignore[no-untyped-def]
        async for _ in request_iterator:
            yield kv_transfer_service_pb2.ConnectResponse()


def using(folder: Path, name: str) -> TlsConfig:
    return TlsConfig(ca=folder / "ca.crt", cert=folder / f"{name}.crt", key=folder / f"{name}.key")


@pytest_asyncio.fixture(name="hub")
async def _hub(tmp_path: Path) -> AsyncGenerator[tuple[str, Path, Authority], None]:
    authority = Authority.open(tmp_path, 1)
    authority.issue_roles(HOSTS, 1)
    server = RpcServer(using(tmp_path, "worker"))
    kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(Hub(), server.server)
    await server.start("127.0.0.1:0")
    await server.set_serving(True)
    yield f"127.0.0.1:{server.port}", tmp_path, authority
    await server.stop(0)


async def code_of(target: str, tls: TlsConfig | None) -> grpc.StatusCode:
    """How GetInstanceInfo ends."""
    async with open_channel(target, tls) as channel:
        stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
        try:
            await stub.GetInstanceInfo(SECRET, timeout=3)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_only_workers_learn_about_memory(hub: tuple[str, Path, Authority]):
    target, folder, _ = hub
    codes = {role: await code_of(target, using(folder, role.value)) for role in Role}
    assert codes.pop(Role.WORKER) is grpc.StatusCode.OK
    assert set(codes.values()) == {grpc.StatusCode.PERMISSION_DENIED}
    assert await code_of(target, None) is grpc.StatusCode.UNAVAILABLE
    for role in Role:
        assert await wait_serving(target, 5, tls=using(folder, role.value)), "health is for every certificate"


async def test_refusals_are_told_to_who_counts_them(tmp_path: Path):
    Authority.open(tmp_path, 1).issue_roles(HOSTS, 1)
    refused: list[IsthmusError] = []
    server = RpcServer(using(tmp_path, "worker"), on_refused=refused.append)
    kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(Hub(), server.server)
    await server.start("127.0.0.1:0")
    for name in ("client", "worker"):
        await code_of(f"127.0.0.1:{server.port}", using(tmp_path, name))
    await server.stop(0)
    assert [one.code for one in refused] == [grpc.StatusCode.PERMISSION_DENIED]


async def test_streams_are_refused_before_their_first_message(hub: tuple[str, Path, Authority]):
    target, folder, _ = hub
    for name, right in (("router", grpc.StatusCode.PERMISSION_DENIED), ("worker", grpc.StatusCode.OK)):
        async with open_channel(target, using(folder, name)) as channel:
            call = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel).Connect(timeout=3)
            await call.done_writing()
            assert await call.code() is right


async def test_certificates_that_are_no_good(
    hub: tuple[str, Path, Authority], tmp_path_factory: pytest.TempPathFactory
):
    target, folder, authority = hub
    authority.issue("expired", [Role.WORKER], HOSTS, -1)
    assert await code_of(target, using(folder, "expired")) is grpc.StatusCode.UNAVAILABLE
    elsewhere = tmp_path_factory.mktemp("foreign")
    Authority.open(elsewhere, 1).issue("worker", [Role.WORKER], HOSTS, 1)
    foreign = TlsConfig(ca=folder / "ca.crt", cert=elsewhere / "worker.crt", key=elsewhere / "worker.key")
    assert await code_of(target, foreign) is grpc.StatusCode.UNAVAILABLE
    authority.issue("nobody", [], HOSTS, 1)
    assert await code_of(target, using(folder, "nobody")) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_server_for_another_name_is_not_believed(hub: tuple[str, Path, Authority]):
    _, folder, authority = hub
    authority.issue("elsewhere", [Role.WORKER], ["db.example"], 1)
    server = RpcServer(using(folder, "elsewhere"))
    await server.start("127.0.0.1:0")
    assert not await wait_serving(f"127.0.0.1:{server.port}", 0.5, tls=using(folder, "worker"))
    await server.stop(0)


async def test_changed_files_are_used_for_new_connections(
    hub: tuple[str, Path, Authority], caplog: pytest.LogCaptureFixture
):
    target, folder, authority = hub
    worker = using(folder, "worker")
    async with open_channel(target, worker) as old:
        stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(old)
        await stub.GetInstanceInfo(SECRET, timeout=3)
        # A certificate for another name: whoever connects from now on sees it.
        authority.issue("worker", [Role.WORKER], ["db.example"], 1)
        assert await code_of(target, worker) is grpc.StatusCode.UNAVAILABLE
        await stub.GetInstanceInfo(SECRET, timeout=3)
        (folder / "worker.crt").write_text("half a certif")
        (folder / "worker.key").unlink()
        authority.issue("client2", [Role.WORKER], HOSTS, 1)
        assert await code_of(target, using(folder, "client2")) is grpc.StatusCode.UNAVAILABLE
        assert "stays as it was" in caplog.text
        authority.issue("worker", [Role.WORKER], HOSTS, 1)
        assert await code_of(target, worker) is grpc.StatusCode.OK


async def test_without_roles_every_certificate_of_the_ca_will_do(tmp_path: Path):
    authority = Authority.open(tmp_path, 1)
    authority.issue("plain", [], HOSTS, 1)
    tls = using(tmp_path, "plain").model_copy(update={"roles": False})
    server = RpcServer(tls)
    kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(Hub(), server.server)
    await server.start("127.0.0.1:0")
    assert await code_of(f"127.0.0.1:{server.port}", tls) is grpc.StatusCode.OK
    await server.stop(0)


def test_an_authority_is_kept_and_its_keys_are_private(tmp_path: Path):
    first = Authority.open(tmp_path, 1).issue_roles(HOSTS, 1)
    ca = (tmp_path / "ca.crt").read_bytes()
    again = Authority.open(tmp_path, 1).issue_roles(HOSTS, 1)
    assert (first, ca) == (again, (tmp_path / "ca.crt").read_bytes())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}
    (tmp_path / "ca.key").write_text("damaged")
    with pytest.raises(ConfigError, match="damaged"):
        Authority.open(tmp_path, 1)
    with pytest.raises(ConfigError, match="--host"):
        Authority.open(tmp_path / "other", 1).issue("x", [], ["häuser"], 1)
