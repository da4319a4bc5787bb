"""The channel and server factory: exclusive ports, health, reflection, typed errors, TLS on both ends."""

from __future__ import annotations

import subprocess
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from isthmus.v1 import inference_service_pb2, inference_service_pb2_grpc

from isthmus_core import errors
from isthmus_core.config import TlsConfig
from isthmus_core.process import free_port, prove_port_free, split_address
from isthmus_core.rpc import RpcServer, abort_with, incoming_trace, open_channel, outgoing_metadata, wait_serving
from isthmus_core.tracing import TraceContext

FILE = inference_service_pb2.DESCRIPTOR


class Servicer(inference_service_pb2_grpc.InferenceServiceServicer):
    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        trace = incoming_trace(context)
        if trace is None:
            await abort_with(context, errors.InvalidRequest("traceparent", "", "send one"))
        card = inference_service_pb2.ModelCard(name=trace.to_traceparent())
        return inference_service_pb2.ListModelsResponse(models=[card])


async def start(tls: TlsConfig | None = None) -> RpcServer:
    server = RpcServer(tls)
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(Servicer(), server.server)
    server.expose(FILE)
    await server.start("127.0.0.1:0")
    return server


async def test_trace_and_typed_errors_cross_the_hop() -> None:
    server = await start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        trace = TraceContext(b"\1" * 16, b"\2" * 8)
        answer = await stub.ListModels(inference_service_pb2.ListModelsRequest(), metadata=outgoing_metadata(trace))
        assert answer.models[0].name == trace.to_traceparent()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListModels(inference_service_pb2.ListModelsRequest())
        error = errors.from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.detail == errors.InvalidRequest("traceparent", "", "send one").detail
    await server.stop(0)


async def test_health_follows_the_truth_and_reflection_lists_the_services() -> None:
    server = await start()
    target = f"127.0.0.1:{server.port}"
    assert not await wait_serving(target, 0.2)
    await server.set_serving(True)
    assert await wait_serving(target, 5, service="isthmus.v1.InferenceService")
    async with open_channel(target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            names = {service.name for service in answer.list_services_response.service}
        assert {"isthmus.v1.InferenceService", "grpc.health.v1.Health"} <= names
        await server.set_serving(False)
        health = health_pb2_grpc.HealthStub(channel)
        status = await health.Check(health_pb2.HealthCheckRequest())
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)


async def test_a_taken_port_is_refused_not_shared() -> None:
    server = await start()
    second = RpcServer()
    with pytest.raises(errors.StartError, match=str(server.port)):
        await second.start(f"127.0.0.1:{server.port}")
    with pytest.raises(errors.StartError, match=r"router\.listen"):
        prove_port_free("127.0.0.1", server.port, "router.listen")
    await server.stop(0)
    prove_port_free("127.0.0.1", free_port())


@pytest.mark.parametrize("address", ["", "host", "host:", "host:99999", "host:x"])
def test_malformed_addresses_name_their_field(address: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"router\.listen"):
        split_address(address, "router.listen")


def make_certificates(folder: Path) -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=node")
    (folder / "san.cnf").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        "x509", "-req", "-in", "csr.pem", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
        "-out", "cert.pem", "-extfile", "san.cnf",
    )  # fmt: skip


async def test_tls_authenticates_both_ends(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = TlsConfig(ca=tmp_path / "ca.pem", cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    server = await start(tls)
    await server.set_serving(True)
    target = f"127.0.0.1:{server.port}"
    assert await wait_serving(target, 5, tls=tls)
    assert not await wait_serving(target, 0.5)  # plain text
    anonymous = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes()))
    with pytest.raises(grpc.aio.AioRpcError):
        await health_pb2_grpc.HealthStub(anonymous).Check(health_pb2.HealthCheckRequest(), timeout=2)
    await anonymous.close()
    await server.stop(0)


def test_unreadable_certificates_are_named(tmp_path: Path) -> None:
    tls = TlsConfig(ca=tmp_path / "ca.pem", cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(errors.ConfigError, match=r"tls\.ca"):
        open_channel("127.0.0.1:1", tls)
