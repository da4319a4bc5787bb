"""For tests of the coordinator: instances by one word, a real server on any free port, instances and routers that speak
the raw streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import coordinator_service_pb2_grpc
from isthmus.v1.common_pb2 import RequestKey as RequestKeyPb

from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.leases import LeaseTable
from isthmus_coordinator.membership import Instance, Role
from isthmus_coordinator.server import CoordinatorServicer, Limits
from isthmus_coordinator.wire import instance_to_pb
from isthmus_core.config import TelemetryConfig
from isthmus_core.rpc import RpcServer, open_channel
from isthmus_core.tracing import Tracing

ROLES = {"c": Role.CONTEXT, "g": Role.GENERATION, "w": Role.CONTEXT_AND_GENERATION}


def instance(name: str, start: int = 1, *, model: str = "m", length: int = 100) -> Instance:
    """`c0` is a context instance, `g0` a generation instance, `w0` one that does everything."""
    return Instance(name, bytes([start]) * 16, f"host-{name}:{start}", ROLES[name[0]], model, length, 16, "mock", 1, 64)


@dataclass
class Running:
    """A coordinator."""

    servicer: CoordinatorServicer
    server: RpcServer

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def stop(self) -> None:
        self.servicer.end_streams()
        await self.server.stop(1)

    async def kill(self) -> None:
        """As a crash: connections break without a word."""
        await self.server.server.stop(None)


async def start_coordinator(
    *,
    port: int = 0,
    ttl_s: float = 10.0,
    grace_s: float = 0.0,
    first: int = 0,
    limits: Limits | None = None,
    tracing: Tracing | None = None,
    cluster: Cluster | None = None,
) -> Running:
    """A coordinator on a loopback port."""
    leases = LeaseTable(ttl_s, grace_s=grace_s, started=time.monotonic(), first=first)
    tracing = tracing or Tracing.from_config(TelemetryConfig(), "test")
    servicer = CoordinatorServicer(leases, tracing, limits or Limits(), cluster=cluster)
    server = RpcServer()
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.server)
    server.expose(pb.DESCRIPTOR)
    await server.start(f"127.0.0.1:{port}")
    await server.set_serving(True)
    return Running(servicer, server)


@asynccontextmanager
async def coordinator(**options: Any) -> AsyncGenerator[Running, None]:
    """A coordinator that must hold nothing once every client is gone."""
    running = await start_coordinator(**options)
    try:
        yield running
        await until(running.servicer.idle)
    finally:
        await running.stop()


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


class RawStream:
    """A stream driven message by message."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, message: object) -> None:
        await self.call.write(message)

    async def receive(self, kind: str) -> Any:
        """The next message, which must be of this kind; news of another kind is skipped."""
        try:
            async with asyncio.timeout(20):
                message: Any = await self.call.read()
                while message is not grpc.aio.EOF and message.WhichOneof("body") in {"served", "peers"} - {kind}:
                    message = await self.call.read()
        except grpc.aio.AioRpcError:
            message = grpc.aio.EOF
        assert message is not grpc.aio.EOF, f"ended: {await self.call.code()} {await self.call.details()}"
        assert message.WhichOneof("body") == kind, message
        return getattr(message, kind)

    async def receive_until(self, kind: str, wanted: Callable[[Any], object]) -> Any:
        """Read states of a kind until one is as wanted."""
        while not wanted(state := await self.receive(kind)):
            pass
        return state

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ends; what is still sent before is skipped."""
        return await ending(self.call)


async def ending(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a stream to its end: its status."""
    async with asyncio.timeout(20):
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code(), await call.details() or ""


@dataclass
class Peer:
    """A client of the coordinator."""

    channel: grpc.aio.Channel

    @property
    def stub(self) -> coordinator_service_pb2_grpc.CoordinatorServiceStub:
        return coordinator_service_pb2_grpc.CoordinatorServiceStub(self.channel)

    async def register(self, one: Instance) -> RawStream:
        """A member's stream, welcomed."""
        stream = RawStream(self.stub.Register())
        await stream.send(pb.RegisterRequest(hello=pb.RegisterHello(instance=instance_to_pb(one))))
        assert (await stream.receive("welcome")).schema_version == 2
        return stream

    async def route(self, router_id: str = "r", lease: pb.IdLease | None = None) -> RawStream:
        """A router's stream, Hello sent."""
        stream = RawStream(self.stub.Route())
        await stream.send(pb.RouteRequest(hello=pb.RouteHello(router_id=router_id, lease=lease)))
        return stream

    async def cluster(self) -> pb.GetClusterResponse:
        return await self.stub.GetCluster(pb.GetClusterRequest(), timeout=20)


@asynccontextmanager
async def peer(target: str) -> AsyncGenerator[Peer, None]:
    """A connection of its own."""
    async with open_channel(target) as channel:
        yield Peer(channel)


def pair_report(context: Instance, state: Any = pb.PAIR_STATE_READY, **fields: Any) -> pb.RegisterRequest:
    """What a generation instance says."""
    report = pb.PairReport(
        context_instance_id=context.instance_id,
        context_incarnation=context.incarnation,
        state=state,
        **fields,
    )
    return pb.RegisterRequest(pair=report)


def select(request_id: int, attempt: int = 0, *, model: str = "m", prompt: int = 4, output: int = 4) -> pb.RouteRequest:
    key = RequestKeyPb(request_id=request_id, attempt=attempt)
    return pb.RouteRequest(select=pb.Select(key=key, model=model, prompt_tokens=prompt, max_tokens=output))


def finish(request_id: int, attempt: int = 0) -> pb.RouteRequest:
    return pb.RouteRequest(finish=pb.Finish(key=RequestKeyPb(request_id=request_id, attempt=attempt)))
