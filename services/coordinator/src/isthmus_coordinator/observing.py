"""The coordinator's metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from isthmus_core.metrics import NO_METRICS, Metrics
from isthmus_core.metrics import services as metric
from isthmus_core.metrics.loop_reader import read_on_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_coordinator.cluster import Cluster
    from isthmus_core.errors import IsthmusError


class CoordinatorMetrics:
    """Counts decisions; looks at the cluster when it is asked."""

    def __init__(self, metrics: Metrics = NO_METRICS) -> None:
        self._metrics = metrics

    def watch(self, cluster: Cluster, routers: Callable[[], int]) -> None:
        """Members, routers and open placements, whenever metrics are collected. Needs a running event loop."""

        def members() -> dict[tuple[str, ...], float]:
            states = Counter(
                (view.instance.role.name.lower(), "draining" if view.draining else "active")
                for view in cluster.members()
            )
            return {key: float(count) for key, count in states.items()}

        if self._metrics.enabled:
            self._metrics.observe(metric.MEMBERS, read_on_loop(members, {}))
            self._metrics.observe(metric.ROUTERS, routers)
            self._metrics.observe(metric.PLACEMENTS_OPEN, cluster.open_requests)

    def placed(self, policy: str, seconds: float, error: IsthmusError | None = None) -> None:
        """A request was placed by `policy`, or could not be."""
        outcome = "ok" if error is None else error.code.name.lower()
        self._metrics.add(metric.PLACEMENTS, 1, policy, outcome)
        self._metrics.record(metric.PLACEMENT_TIME, seconds)
