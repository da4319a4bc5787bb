"""Everything that a worker tells about itself: put together once, when its name is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.metrics import services
from isthmus_core.metrics import workers as metric
from isthmus_core.telemetry import open_telemetry
from isthmus_worker.hub.leg_telemetry import LegTelemetry
from isthmus_worker.hub.timelines import Timelines
from isthmus_worker.hub.transfer_telemetry import TransferTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_core.config import TelemetryConfig
    from isthmus_worker.engine import EngineLoad


class WorkerTelemetry:
    """`legs` and `transfers` are told what happens. Opens what `config` asks for; raises StartError when its metrics
    port is taken."""

    def __init__(self, config: TelemetryConfig, instance_id: str, role: str) -> None:
        attributes = {"service.instance.id": instance_id, "isthmus.role": role}
        self._telemetry = open_telemetry(config, "worker", attributes)
        self.tracing, self.metrics = self._telemetry.tracing, self._telemetry.metrics
        self.legs = LegTelemetry(self.tracing, self.metrics, Timelines(config.timelines), instance_id)
        self.transfers = TransferTelemetry(self.legs)

    def watch(self, load: Callable[[], EngineLoad], registered: Callable[[], bool]) -> None:
        """The engine's load and the membership, whenever metrics are collected. `load` only looks at plain values."""
        observe = self.metrics.observe
        observe(metric.RUNNING, lambda: load().running_requests)
        observe(metric.WAITING, lambda: load().waiting_requests)
        observe(metric.HELD, lambda: load().held_handoffs)
        observe(metric.KV_BLOCKS, lambda: _blocks(load()))
        observe(metric.KV_USAGE, lambda: _usage(load()))
        observe(services.COORDINATOR_CONNECTED, lambda: float(registered()))

    def shutdown(self) -> None:
        """Send what is left and stop. Not on the event loop."""
        self._telemetry.shutdown()


def _blocks(load: EngineLoad) -> dict[tuple[str, ...], float]:
    return {
        ("free",): max(0, load.total_blocks - load.used_blocks),
        ("used",): load.used_blocks,
        ("in_doubt",): load.in_doubt_blocks,
    }


def _usage(load: EngineLoad) -> float:
    return load.used_blocks / load.total_blocks if load.total_blocks else 0.0
