"""The router process: builds the parts, runs the front ends, takes everything down again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket

from isthmus_core.logs import setup_logging
from isthmus_core.process import prove_port_free, split_address
from isthmus_core.service import ServiceContext
from isthmus_core.tracing import Tracing
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.front import serve, unless_stopping
from isthmus_router.http.server import bind
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import Schedule
from isthmus_router.tokenizer import open_tokenizer
from isthmus_router.worker_client import WorkerClient

# Files that a router has open besides its clients' connections: channels to workers, logs, the selector.
OTHER_FILES = 256
logger = logging.getLogger(__name__)


def raise_file_limit(max_connections: int) -> None:
    """Let the process open as many files as `max_connections` need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning("router.max_connections = %d needs %d open files, %d allowed", max_connections, needed, allowed)


async def main(context: ServiceContext) -> None:
    """Run a router until it is asked to stop. Raises ConfigError or StartError when it can not start."""
    config = context.config
    router_id = f"router-{socket.gethostname()}-{os.getpid()}"
    setup_logging(config.logging, "router", router_id)
    raise_file_limit(config.router.max_connections)
    host, port = split_address(config.router.listen, "router.listen")
    prove_port_free(host, port, "router.listen")
    with bind(config.router.http_listen) as http_socket:
        tokenizers = {config.model.served_name: open_tokenizer(config.model)}
        coordinator = CoordinatorClient(config.router.coordinator, router_id, config.tls, config.router.start_timeout_s)
        tracing = Tracing.from_config(config.telemetry, "isthmus-router", {"service.instance.id": router_id})
        workers = WorkerClient(config.tls)
        limit = config.router.max_body_bytes
        schedule = Schedule(config.router.schedule)
        pipeline = Pipeline(coordinator, workers, tokenizers, tracing, max_text_bytes=limit, schedule=schedule)
        try:
            if await unless_stopping(context.stopping, coordinator.start()):
                await serve(config.router, config.tls, pipeline, http_socket, context.stopping)
        finally:
            await pipeline.close()
            await workers.close()
            await coordinator.close()
            await asyncio.to_thread(tracing.shutdown)
