"""The router process: gRPC and HTTP front ends over one pipeline, in one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from typing import Any

from isthmus_core.config import RouterConfig, TlsConfig
from isthmus_core.logs import setup_logging
from isthmus_core.process import prove_port_free, split_address
from isthmus_core.rpc import RpcServer
from isthmus_core.service import ServiceContext
from isthmus_core.tracing import Tracing
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.grpc_server import InferenceServicer, add_inference_service
from isthmus_router.http.app import make_app
from isthmus_router.http.server import HttpServer, bind
from isthmus_router.pipeline import Pipeline
from isthmus_router.tokenizer import open_tokenizer
from isthmus_router.worker_client import WorkerClient

logger = logging.getLogger(__name__)

# How often readiness is looked at; load balancers ask less often.
READINESS_INTERVAL_S = 0.2


async def main(context: ServiceContext) -> None:
    """Run a router until it is asked to stop. Raises ConfigError or StartError when it can not start."""
    config = context.config
    router_id = f"router-{socket.gethostname()}-{os.getpid()}"
    setup_logging(config.logging, "router", router_id)
    host, port = split_address(config.router.listen, "router.listen")
    prove_port_free(host, port, "router.listen")
    with bind(config.router.http_listen) as http_socket:
        tokenizers = {config.model.served_name: open_tokenizer(config.model)}
        coordinator = CoordinatorClient(config.router.coordinator, router_id, config.tls, config.router.start_timeout_s)
        tracing = Tracing.from_config(config.telemetry, "isthmus-router", {"service.instance.id": router_id})
        workers = WorkerClient(config.tls)
        limit = config.router.max_body_bytes
        pipeline = Pipeline(coordinator, workers, tokenizers, tracing, max_text_bytes=limit)
        try:
            if await _unless_stopping(context.stopping, coordinator.start()):
                await serve(config.router, config.tls, pipeline, http_socket, context.stopping)
        finally:
            await pipeline.close()
            await workers.close()
            await coordinator.close()
            await asyncio.to_thread(tracing.shutdown)


async def serve(
    config: RouterConfig, tls: TlsConfig, pipeline: Pipeline, http_socket: socket.socket, stopping: asyncio.Event
) -> None:
    """Serve both front ends until `stopping` is set, then drain for at most `drain_s` seconds.

    Raises StartError when the gRPC port is taken, and whatever ends the HTTP server before its time.
    """
    rpc = RpcServer(tls)
    add_inference_service(rpc, InferenceServicer(pipeline, config.request_timeout_s))
    app = make_app(pipeline, max_body_bytes=config.max_body_bytes, request_timeout_s=config.request_timeout_s)
    http = HttpServer(app, http_socket, config.drain_s)
    grpc_port = await rpc.start(config.listen, "router.listen")
    http.start()
    logger.info("router listens", extra={"grpc_port": grpc_port, "http_port": http.port})
    readiness = asyncio.create_task(_follow_readiness(pipeline, rpc))
    try:
        await _unless_stopping(stopping, http.failed())
    finally:
        readiness.cancel()
        await asyncio.wait((readiness,))
        logger.info("router stops", extra={"running_requests": pipeline.running, "drain_s": config.drain_s})
        await asyncio.gather(rpc.stop(config.drain_s), http.stop())
        logger.info("router stopped", extra={"running_requests": pipeline.running})


async def _follow_readiness(pipeline: Pipeline, rpc: RpcServer) -> None:
    """Keep grpc.health.v1 at SERVING exactly while a request can be served."""
    before: list[str] | None = None
    while True:
        missing = pipeline.missing()
        if missing != before:
            before = missing
            await rpc.set_serving(not missing)
            if missing:
                logger.warning("not ready: %s", "; ".join(missing))
            else:
                logger.info("ready", extra={"models": ", ".join(model.name for model in pipeline.models())})
        await asyncio.sleep(READINESS_INTERVAL_S)


async def _unless_stopping(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await `work`; False when `stopping` was set first (`work` is cancelled then). Raises what `work` raises."""
    task = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for pending in (task, stop):
            pending.cancel()
        await asyncio.wait((task, stop))
