"""A router with both front ends on real ports, over fake workers on real ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import openai
from grpc_health.v1 import health_pb2, health_pb2_grpc
from isthmus.v1 import worker_service_pb2_grpc
from isthmus.v1.inference_service_pb2_grpc import InferenceServiceStub

from isthmus_core.config import RouterConfig, TelemetryConfig, TlsConfig
from isthmus_core.process import free_port
from isthmus_core.rpc import RpcServer, open_channel
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.front import serve
from isthmus_router.http.server import bind
from isthmus_router.pipeline import Pipeline
from isthmus_router.retry import RetryPolicy
from isthmus_router.rules import Rules
from isthmus_router.worker_client import WorkerClient
from router_fakes import FakeCoordinator, FakeInstance, FakeModel, FakePlacement, FakeWorkerServicer

NO_TLS = TlsConfig()


class Worker:
    """A fake worker on a port of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.servicer = FakeWorkerServicer()
        self.rpc = RpcServer()

    async def start(self, address: str = "127.0.0.1:0") -> FakeInstance:
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self.rpc.server)
        port = await self.rpc.start(address)
        return FakeInstance(self.name, f"127.0.0.1:{port}", self.name.encode().ljust(16, b"."))


class Router:
    """A router with two workers, on free ports."""

    def __init__(self, **settings: Any) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self.config = RouterConfig(
            listen=f"127.0.0.1:{self.grpc_port}",
            http_listen=f"127.0.0.1:{self.http_port}",
            **cast("dict[str, Any]", {"drain_s": 5.0, "request_timeout_s": 20.0, **settings}),
        )
        self.context, self.generation = Worker("context"), Worker("generation")
        self.coordinator = FakeCoordinator(models=[FakeModel("m", 4096)])
        self.workers = WorkerClient()
        self.stopping = asyncio.Event()
        self.url = f"http://127.0.0.1:{self.http_port}"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Router]:
        self.coordinator.placement = FakePlacement(await self.context.start(), await self.generation.start())
        tracing = Tracing.from_config(TelemetryConfig(), "test")
        tokenizers = {"m": ByteTokenizer()}
        # These tests look at one try.
        rules = Rules(retry=RetryPolicy(max_attempts=1))
        pipeline = Pipeline(self.coordinator, self.workers, tokenizers, tracing, max_text_bytes=100_000, rules=rules)
        with bind(self.config.http_listen) as sock:
            self.task = asyncio.create_task(serve(self.config, NO_TLS, pipeline, sock, self.stopping))
            self.channel = open_channel(self.config.listen)
            self.stub = InferenceServiceStub(self.channel)
            try:
                await self.health(health_pb2.HealthCheckResponse.SERVING)
                yield self
            finally:
                await self.channel.close()
                self.stopping.set()
                await self.task
                await pipeline.close()
                await self.workers.close()
                await asyncio.gather(self.context.rpc.stop(0), self.generation.rpc.stop(0))
        assert self.coordinator.open == set()

    async def health(self, status: int) -> None:
        stub: Any = health_pb2_grpc.HealthStub(self.channel)  # the stubs do not know its methods
        request = health_pb2.HealthCheckRequest(service="isthmus.v1.InferenceService")
        while (await stub.Check(request, wait_for_ready=True)).status != status:
            await asyncio.sleep(0.05)

    def openai(self, retries: int = 0) -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=retries, http_client=http)

    async def until(self, condition: str) -> None:
        """Wait until an expression over this router is true."""
        while not eval(condition, {"r": self}):
            await asyncio.sleep(0.01)
