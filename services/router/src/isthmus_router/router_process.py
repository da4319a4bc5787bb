"""A router process: builds the parts, runs the front ends, takes everything down again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import time
from contextlib import AsyncExitStack

from isthmus_core.api_keys import read_keys
from isthmus_core.logs import setup_logging
from isthmus_core.process import prove_port_free, settle_heap, split_address
from isthmus_core.service import ServiceContext
from isthmus_core.telemetry import open_telemetry
from isthmus_router.cluster_watch import ClusterWatch
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.embedded import embedded_coordinator
from isthmus_router.fleet.reporter import StatusReporter
from isthmus_router.front import serve, unless_stopping
from isthmus_router.http.server import bind
from isthmus_router.local_placement import LocalPlacement
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import Coordinator
from isthmus_router.recorder import RequestRecorder
from isthmus_router.rules import Rules
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


async def run_router(context: ServiceContext, *, status_fd: int | None = None) -> None:
    """Serve until asked to stop. `status_fd`: this is one process of a fleet; it shares the public ports with the
    others and writes its status there. Raises ConfigError or StartError when it can not start."""
    config = context.config
    shared = status_fd is not None
    router_id = f"router-{socket.gethostname()}-{os.getpid()}"
    setup_logging(config.logging, "router", router_id)
    raise_file_limit(config.router.max_connections)
    if config.router.clients.keys_file is not None:
        read_keys(config.router.clients.keys_file)  # what is wrong with them is said before anybody is waited for
    if not shared:
        host, port = split_address(config.router.listen, "router.listen")
        prove_port_free(host, port, "router.listen")
    async with AsyncExitStack() as parts:
        http_socket = parts.enter_context(bind(config.router.http_listen, shared=shared))
        tokenizers = {config.model.served_name: open_tokenizer(config.model)}
        telemetry = open_telemetry(config.telemetry, "router", {"service.instance.id": router_id})
        parts.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        target = config.router.coordinator
        if config.router.embedded:
            target = await parts.enter_async_context(embedded_coordinator(config, telemetry))
        client = CoordinatorClient(target, router_id, config.tls, config.router.start_timeout_s)
        parts.push_async_callback(client.close)
        coordinator: Coordinator = client
        watch: ClusterWatch | None = None
        if config.router.policy != "coordinator":
            watch = ClusterWatch(target, config.tls)
            parts.push_async_callback(watch.close)
            coordinator = LocalPlacement(client, lambda: watch.view, config.router.policy, time.monotonic)
        gather_s = config.router.coalesce_ms / 1e3
        workers = WorkerClient(config.tls, gather_s=gather_s)
        parts.push_async_callback(workers.close)
        pipeline = Pipeline(
            coordinator,
            workers,
            tokenizers,
            telemetry.tracing,
            max_text_bytes=config.router.max_body_bytes,
            rules=Rules.of(config.router),
            one_by_one=not gather_s,
            recorder=RequestRecorder(telemetry.metrics, tuple(tokenizers), log_prompts=config.logging.log_prompts),
        )
        parts.push_async_callback(pipeline.close)
        if status_fd is not None:
            parts.enter_context(StatusReporter(status_fd, pipeline, telemetry.metrics_port))
        if await unless_stopping(context.stopping, client.start()):
            if watch is not None:
                watch.start()
            settle_heap()
            await serve(config.router, config.tls, pipeline, http_socket, context.stopping, shared=shared)
