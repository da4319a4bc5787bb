"""Everything a process tells about itself, as configured: traces, metrics, where they go."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from isthmus_core.config_telemetry import TelemetryConfig
from isthmus_core.logs import lost_lines
from isthmus_core.metrics import Metrics
from isthmus_core.metrics.prometheus import MetricsEndpoint, open_registry
from isthmus_core.metrics.push import MetricsPusher
from isthmus_core.metrics.services import BUILD_INFO, LOG_LINES_LOST, SPANS_DROPPED
from isthmus_core.tracing import Tracing

logger = logging.getLogger(__name__)

_PUSH_TIMEOUT_S = 5


class Telemetry:
    """Tracing and metrics of one process. `registry`: what its /metrics shows, None without one."""

    def __init__(
        self,
        tracing: Tracing,
        metrics: Metrics,
        registry: CollectorRegistry | None = None,
        endpoint: MetricsEndpoint | None = None,
        pusher: MetricsPusher | None = None,
    ) -> None:
        self.tracing, self.metrics, self.registry = tracing, metrics, registry
        self._endpoint, self._pusher = endpoint, pusher

    @property
    def metrics_port(self) -> int | None:
        """Where /metrics is; None without an endpoint."""
        return None if self._endpoint is None else self._endpoint.port

    def shutdown(self) -> None:
        """Send what is left and stop; takes a few seconds when the receiver does not answer. Not on the event loop."""
        self.tracing.shutdown()
        if self._pusher is not None:
            self._pusher.shutdown()
        if self._endpoint is not None:
            self._endpoint.close()


def open_telemetry(config: TelemetryConfig, service: str, attributes: Mapping[str, str] | None = None) -> Telemetry:
    """Start what is configured. `service`: router, coordinator or worker; `attributes` of the OpenTelemetry resource
    beside service.name and service.version. Raises ConfigError or StartError when /metrics can not be served."""
    # It says with every failed export what `span_export` and `metrics.push` say once.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    build = version("isthmus-core")
    resource = {"service.version": build, **(attributes or {})}
    name = f"isthmus-{service}"
    registry = open_registry() if config.metrics_listen is not None or config.push_metrics else None
    endpoint = pusher = None
    if config.metrics_listen is not None and registry is not None:
        endpoint = MetricsEndpoint(config.metrics_listen, registry)
        logger.info("metrics at port %d", endpoint.port, extra={"metrics_port": endpoint.port})
    if config.push_metrics and config.otlp_endpoint is not None and registry is not None:
        insecure = not config.otlp_endpoint.startswith("https://")
        exporter = OTLPMetricExporter(endpoint=config.otlp_endpoint, insecure=insecure, timeout=_PUSH_TIMEOUT_S)
        named = Resource.create({"service.name": name, **resource})
        pusher = MetricsPusher(exporter, registry, named, config.push_interval_s)
    tracing = Tracing.from_config(config, name, resource)
    metrics = Metrics(registry)
    labels = (service, build, platform.python_version())
    metrics.observe(BUILD_INFO, lambda: {labels: 1})
    metrics.observe(SPANS_DROPPED, tracing.dropped_spans)
    metrics.observe(LOG_LINES_LOST, lost_lines)
    return Telemetry(tracing, metrics, registry, endpoint, pusher)
