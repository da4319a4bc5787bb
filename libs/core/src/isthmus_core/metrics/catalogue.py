"""Every metric of every service. docs/observability.md, dashboards and alert rules are checked against it."""

from __future__ import annotations

from isthmus_core.metrics import services, workers
from isthmus_core.metrics.definitions import Definition

CATALOGUE: tuple[Definition, ...] = tuple(
    value for module in (services, workers) for value in vars(module).values() if isinstance(value, Definition)
)
