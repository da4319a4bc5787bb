"""The router process: builds the parts, runs the front ends, takes everything down again."""

from __future__ import annotations

import asyncio
import os
import socket

from isthmus_core.logs import setup_logging
from isthmus_core.process import prove_port_free, split_address
from isthmus_core.service import ServiceContext
from isthmus_core.tracing import Tracing
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.front import serve, unless_stopping
from isthmus_router.http.server import bind
from isthmus_router.pipeline import Pipeline
from isthmus_router.tokenizer import open_tokenizer
from isthmus_router.worker_client import WorkerClient


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
            if await unless_stopping(context.stopping, coordinator.start()):
                await serve(config.router, config.tls, pipeline, http_socket, context.stopping)
        finally:
            await pipeline.close()
            await workers.close()
            await coordinator.close()
            await asyncio.to_thread(tracing.shutdown)
