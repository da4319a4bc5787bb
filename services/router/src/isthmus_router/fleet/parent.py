"""The parent of a router fleet: holds the ports, keeps the children alive, answers for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack

from isthmus_core.config import IsthmusConfig
from isthmus_core.logs import setup_logging
from isthmus_core.metrics.prometheus import MetricsEndpoint, fetch_texts, merged_registry
from isthmus_core.service import ServiceContext
from isthmus_router.embedded import check_installed
from isthmus_router.fleet.control import make_control_app
from isthmus_router.fleet.member import Member
from isthmus_router.fleet.ports import ReservedPort
from isthmus_router.fleet.status import Status
from isthmus_router.http.server import HttpServer, bind

logger = logging.getLogger(__name__)

# Beyond the drain time, for a child to leave.
_EXIT_MARGIN_S = 10.0
_CONTROL_CONNECTIONS = 256
_CONTROL_TIMEOUT_S = 10.0


class Fleet:
    """Children of one configuration. `coordinator`: the implicit one, started beside the routers."""

    def __init__(self, context: ServiceContext, grpc: ReservedPort, http: ReservedPort) -> None:
        config = context.config
        given = [] if context.config_path is None else ["--config", str(context.config_path)]
        given += [flag for override in context.overrides for flag in ("--set", override)]
        self._config = config
        self.coordinator: Member | None = None
        own = [f"router.listen={grpc.address}", f"router.http_listen={http.address}", "router.num_workers=1"]
        # Its own port for /metrics; the parent gathers them.
        own.append("telemetry.metrics_listen=127.0.0.1:0")
        if config.router.embedded:
            check_installed()
            self.coordinator = Member("coordinator", "isthmus_coordinator", [*given, *_no_metrics(config)])
            own.append(f"router.coordinator={config.coordinator.listen}")
        arguments = [*given, *(flag for override in own for flag in ("--set", override))]
        count = config.router.num_workers
        self.routers = [Member(f"router-{index}", "isthmus_router", arguments) for index in range(count)]

    def statuses(self) -> Sequence[tuple[str, Status | None]]:
        """Name and last word of every router process."""
        return [(member.name, member.status) for member in self.routers]

    def metrics_ports(self) -> dict[str, int]:
        """Where the /metrics of the children are, by name."""
        known = [(member.name, member.status) for member in self.routers]
        return {name: status.metrics_port for name, status in known if status and status.metrics_port}

    async def run(self, stopping: asyncio.Event) -> None:
        """Keep every child alive until `stopping` is set. Raises ConfigError or StartError when that is no use."""
        members = [*self.routers, *([self.coordinator] if self.coordinator else [])]
        keepers = [asyncio.create_task(member.keep(), name=member.name) for member in members]
        stop = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stop:
                    await task
        finally:
            for task in (stop, *keepers):
                task.cancel()
            await asyncio.gather(stop, *keepers, return_exceptions=True)

    async def stop(self) -> None:
        """The routers drain, then the coordinator ends."""
        grace = self._config.router.drain_s + _EXIT_MARGIN_S
        await asyncio.gather(*(member.stop(grace) for member in self.routers))
        if self.coordinator is not None:
            await self.coordinator.stop(_EXIT_MARGIN_S)


def _no_metrics(config: IsthmusConfig) -> list[str]:
    """The parent has the configured port for /metrics."""
    return ["--set", "telemetry.metrics_listen=null"] if config.telemetry.metrics_listen else []


async def run_parent(context: ServiceContext) -> None:
    """Run a fleet until it is asked to stop. Raises ConfigError or StartError when it can not start."""
    config = context.config
    setup_logging(config.logging, "router", "fleet")
    with ExitStack() as held:
        grpc = held.enter_context(ReservedPort(config.router.listen, "router.listen"))
        http = held.enter_context(ReservedPort(config.router.http_listen, "router.http_listen"))
        control_socket = held.enter_context(bind(config.router.control_listen, "router.control_listen"))
        fleet = Fleet(context, grpc, http)
        registry = merged_registry(lambda: fetch_texts(fleet.metrics_ports()))
        if config.telemetry.metrics_listen is not None:
            held.callback(MetricsEndpoint(config.telemetry.metrics_listen, registry).close)
        app = make_control_app(fleet.statuses, registry, context.stopping.is_set, context.stopping.set)
        control = HttpServer(
            app,
            control_socket,
            config.router.drain_s,
            max_connections=_CONTROL_CONNECTIONS,
            client_timeout_s=_CONTROL_TIMEOUT_S,
        )
        control.start()
        logger.info(
            "router fleet of %d processes",
            config.router.num_workers,
            extra={"grpc_port": grpc.port, "http_port": http.port, "control_port": control.port},
        )
        try:
            await fleet.run(context.stopping)
        finally:
            context.stopping.set()
            await fleet.stop()
            await control.stop()
