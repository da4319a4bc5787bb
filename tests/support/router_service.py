"""Services as processes, and a worker in this process that registers with a real coordinator."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from isthmus.v1 import coordinator_service_pb2 as coordinator_pb
from isthmus.v1 import worker_service_pb2_grpc
from isthmus.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub

from isthmus_core.rpc import RpcServer, open_channel
from router_fakes import FakeWorkerServicer


@asynccontextmanager
async def service(module: str, *overrides: str) -> AsyncGenerator[Process, None]:
    """`python -m MODULE --set OVERRIDE...`; killed at the end unless it has left."""
    flags = [flag for override in overrides for flag in ("--set", override)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *flags, stdout=DEVNULL, stderr=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class RegisteringWorker:
    """A worker that registers and serves everything by itself."""

    def __init__(self, coordinator: str) -> None:
        self.servicer = FakeWorkerServicer()
        self.rpc = RpcServer()
        self._channel = open_channel(coordinator)

    async def join(self) -> None:
        """Serve and register."""
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.rpc.server)
        port = await self.rpc.start("127.0.0.1:0")
        instance = coordinator_pb.InstanceDescriptor(
            instance_id="whole-0",
            incarnation=b"w" * 16,
            endpoint=f"127.0.0.1:{port}",
            role="INSTANCE_ROLE_CONTEXT_AND_GENERATION",
            model="m",
            max_model_len=4096,
            tokens_per_block=16,
            engine="mock",
            schema_version=1,
            total_blocks=1000,
        )
        self._call = CoordinatorServiceStub(self._channel).Register()
        hello = coordinator_pb.RegisterHello(instance=instance)
        await self._call.write(coordinator_pb.RegisterRequest(hello=hello))
        first = await self._call.read()
        assert isinstance(first, coordinator_pb.RegisterResponse), first
        assert first.HasField("welcome")

    async def leave(self) -> None:
        """End both."""
        self._call.cancel()
        await self._channel.close()
        await self.rpc.stop(0)
