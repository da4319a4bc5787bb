"""The coordinator process: builds the parts, serves, takes everything down again."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_coordinator.leases import ALL_BITS, LeaseTable
from isthmus_coordinator.server import CoordinatorServicer, Limits, wall_ms
from isthmus_core.config import CoordinatorConfig
from isthmus_core.errors import StartError
from isthmus_core.logs import setup_logging
from isthmus_core.rpc import RpcServer
from isthmus_core.service import ServiceContext
from isthmus_core.tracing import Tracing

logger = logging.getLogger(__name__)

# Instances look for a restarted coordinator every 2 s, with as much again until their connection stands.
_SETTLE_S = 5.0
# Time for the last statuses to be read.
_GRACE_S = 1.0


def build(config: CoordinatorConfig, tracing: Tracing) -> CoordinatorServicer:
    """The service as configured. Raises StartError when the system's clock can not be right."""
    if wall_ms() < 0:
        raise StartError("the system's clock is before 2026: request ids are made from it; set the clock")
    grace_s = config.lease_ttl_s if config.id_grace_s is None else config.id_grace_s
    leases = LeaseTable(config.lease_ttl_s, grace_s=grace_s, started=time.monotonic(), first=random.randrange(ALL_BITS))
    # Without a grace there was no earlier coordinator, so there is nobody to wait for.
    return CoordinatorServicer(leases, tracing, Limits(settle_s=min(grace_s, _SETTLE_S)))


async def main(context: ServiceContext) -> None:
    """Run a coordinator until it is asked to stop. Raises ConfigError or StartError when it can not start."""
    config = context.config
    setup_logging(config.logging, "coordinator")
    tracing = Tracing.from_config(config.telemetry, "isthmus-coordinator")
    servicer = build(config.coordinator, tracing)
    server = RpcServer(config.tls)
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.server)
    server.expose(coordinator_service_pb2.DESCRIPTOR)
    try:
        port = await server.start(config.coordinator.listen, "coordinator.listen")
        await server.set_serving(True)
        logger.info("coordinator is up on port %d", port)
        await context.stopping.wait()
        servicer.end_streams()
        await server.stop(_GRACE_S)
    finally:
        await asyncio.to_thread(tracing.shutdown)
