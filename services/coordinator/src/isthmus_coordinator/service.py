"""The coordinator process: builds the parts, serves, takes everything down again."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.costs import Weights
from isthmus_coordinator.leases import ALL_BITS, LeaseTable
from isthmus_coordinator.listed_members import ListedMembers, listed_members
from isthmus_coordinator.observing import CoordinatorMetrics
from isthmus_coordinator.policies import Policy
from isthmus_coordinator.server import CoordinatorServicer, Limits, wall_ms
from isthmus_core.config import CoordinatorConfig, TlsConfig
from isthmus_core.errors import StartError
from isthmus_core.logs import setup_logging
from isthmus_core.metrics import NO_METRICS, Metrics
from isthmus_core.process import settle_heap
from isthmus_core.rpc import RpcServer
from isthmus_core.service import ServiceContext
from isthmus_core.telemetry import Telemetry, open_telemetry
from isthmus_core.tracing import Tracing

logger = logging.getLogger(__name__)

# Instances look for a restarted coordinator every 2 s, with as much again until their connection stands.
_SETTLE_S = 5.0
# A listed instance that is up says who it is at once.
_HELLO_S = 10.0
# Time for the last statuses to be read.
_GRACE_S = 1.0


def build(config: CoordinatorConfig, tracing: Tracing, metrics: Metrics = NO_METRICS) -> CoordinatorServicer:
    """The service as configured. Raises StartError when the system's clock can not be right."""
    if wall_ms() < 0:
        raise StartError("the system's clock is before 2026: request ids are made from it; set the clock")
    grace_s = config.lease_ttl_s if config.id_grace_s is None else config.id_grace_s
    leases = LeaseTable(config.lease_ttl_s, grace_s=grace_s, started=time.monotonic(), first=random.randrange(ALL_BITS))
    # Without a grace there was no earlier coordinator, so there is nobody to wait for.
    limits = Limits(settle_s=_SETTLE_S if grace_s > 0 else 0.0)
    placement = config.placement
    weights = Weights(
        load=placement.load_weight,
        decode=placement.decode_weight,
        balance=placement.balance_weight,
        prefill_tokens_per_s=placement.prefill_tokens_per_s,
        overload=placement.overload_factor,
        slack_tokens=placement.overload_slack_tokens,
    )
    cluster = Cluster(Policy(config.policy), weights, config.index_blocks)
    return CoordinatorServicer(leases, tracing, limits, metrics=CoordinatorMetrics(metrics), cluster=cluster)


async def main(context: ServiceContext) -> None:
    """Run a coordinator until it is asked to stop. Raises ConfigError or StartError when it can not start."""
    config = context.config
    setup_logging(config.logging, "coordinator")
    telemetry = open_telemetry(config.telemetry, "coordinator")
    try:
        settle_heap()
        await serve(config.coordinator, config.tls, telemetry, context.stopping)
    finally:
        await asyncio.to_thread(telemetry.shutdown)


async def serve(
    config: CoordinatorConfig,
    tls: TlsConfig,
    telemetry: Telemetry,
    stopping: asyncio.Event,
    started: asyncio.Future[int] | None = None,
) -> None:
    """Serve on `coordinator.listen` until `stopping`; `started` gets the port. For other processes too, which may run a
    coordinator in their event loop. Raises StartError when the port is taken or the system's clock can not be right,
    ConfigError for a list of members that makes no sense."""
    listed = listed_members(config.members)
    servicer = build(config, telemetry.tracing, telemetry.metrics)
    server = RpcServer(tls)
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.server)
    server.expose(coordinator_service_pb2.DESCRIPTOR)
    port = await server.start(config.listen, "coordinator.listen")
    await server.set_serving(True)
    members = ListedMembers(listed, servicer.members, tls, _HELLO_S)
    members.start()
    logger.info("coordinator is up on port %d", port)
    if started is not None:
        started.set_result(port)
    try:
        await stopping.wait()
    finally:
        await members.close()
        servicer.end_streams()
        await server.stop(_GRACE_S)
