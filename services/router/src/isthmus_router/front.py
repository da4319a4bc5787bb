"""Both front ends over one pipeline: serving, readiness, and a graceful end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any

from isthmus_core.config import RouterConfig, TlsConfig
from isthmus_core.rpc import RpcServer
from isthmus_router.clients import Gate
from isthmus_router.grpc_server import InferenceServicer, add_inference_service
from isthmus_router.http.app import Limits, make_app
from isthmus_router.http.server import HttpServer
from isthmus_router.pipeline import Pipeline

logger = logging.getLogger(__name__)

# How often readiness is looked at; load balancers ask less often.
READINESS_INTERVAL_S = 0.2


async def serve(
    config: RouterConfig,
    tls: TlsConfig,
    pipeline: Pipeline,
    http_socket: socket.socket,
    stopping: asyncio.Event,
    *,
    shared: bool = False,
) -> None:
    """Serve both front ends until `stopping` is set, then drain for at most `drain_s` seconds. `shared`: other
    processes listen on the same ports.

    Raises ConfigError when the API keys are wrong, StartError when the gRPC port is taken, and whatever ends the HTTP
    server before its time.
    """
    gate = Gate(config.clients, time.monotonic)
    rpc = RpcServer(tls, share_port=shared, max_request_bytes=config.max_body_bytes, on_refused=pipeline.refused)
    tenants = config.admission.tenant_header
    servicer = InferenceServicer(pipeline, config.request_timeout_s, config.client_timeout_s, tenants, gate)
    add_inference_service(rpc, servicer)
    limits = Limits(config.max_body_bytes, config.request_timeout_s, config.client_timeout_s, tenants)
    app = make_app(pipeline, limits, gate)
    http = HttpServer(
        app,
        http_socket,
        config.drain_s,
        max_connections=config.max_connections,
        client_timeout_s=config.client_timeout_s,
        on_refused=pipeline.refused,
    )
    grpc_port = await rpc.start(config.listen, "router.listen")
    http.start()
    logger.info("router listens", extra={"grpc_port": grpc_port, "http_port": http.port})
    readiness = asyncio.create_task(_follow_readiness(pipeline, rpc))
    try:
        await unless_stopping(stopping, http.failed())
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


async def unless_stopping(stopping: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
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
