"""The registry as OTLP, to a receiver that may not be there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import cast

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from isthmus_core.metrics.catalogue import CATALOGUE

logger = logging.getLogger(__name__)

_SCOPE = InstrumentationScope("isthmus")
_DEFINITIONS = {one.prometheus.removesuffix("_total"): one for one in CATALOGUE}
# Smallest and largest value of a histogram: optional on the wire, which the data class does not know.
_UNKNOWN = cast("float", None)
_CUMULATIVE = AggregationTemporality.CUMULATIVE


class MetricsPusher:
    """Sends everything every `interval_s` seconds, on a thread of its own. Nothing is kept for later: each export has
    the sums since the start. The log says once that the receiver does not answer, and once that it does again."""

    def __init__(
        self, exporter: MetricExporter, registry: CollectorRegistry, resource: Resource, interval_s: float
    ) -> None:
        self._exporter, self._registry, self._resource = exporter, registry, resource
        self._interval_s, self._started_ns = interval_s, time.time_ns()
        self._stopping = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="isthmus-metrics", daemon=True)
        self._thread.start()

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Send once more and stop; a receiver that does not answer is not waited for longer than `timeout_s`."""
        self._stopping.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()  # pyright: ignore[reportUnknownMemberType]
        self._thread.join(1.0)

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(self._interval_s)
            data = metrics_data(self._registry, self._resource, self._started_ns, time.time_ns())
            result = self._exporter.export(data)  # pyright: ignore[reportUnknownMemberType]
            failed = result is not MetricExportResult.SUCCESS
            if failed != self._failing:
                self._failing = failed
                if failed:
                    logger.warning("metrics are not sent: telemetry.otlp_endpoint does not take them")
                else:
                    logger.info("metrics are sent to telemetry.otlp_endpoint again")


def metrics_data(registry: CollectorRegistry, resource: Resource, started_ns: int, now_ns: int) -> MetricsData:
    """All metrics of a registry as OTLP has them; times in Unix ns."""
    metrics = [_metric(family, started_ns, now_ns) for family in registry.collect()]
    scope = ScopeMetrics(_SCOPE, [one for one in metrics if one is not None], "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, started_ns: int, now_ns: int) -> Metric | None:
    known = _DEFINITIONS.get(family.name)
    name, unit = (family.name, family.unit) if known is None else (known.name, known.unit)
    match family.type:
        case "counter":
            data: Sum | Gauge | Histogram = Sum(list(_numbers(family.samples, started_ns, now_ns)), _CUMULATIVE, True)
        case "gauge":
            data = Gauge(list(_numbers(family.samples, started_ns, now_ns)))
        case "histogram":
            data = Histogram(list(_histograms(family.samples, started_ns, now_ns)), _CUMULATIVE)
        case _:
            return None
    return Metric(name, family.documentation, unit, data)


def _numbers(samples: Iterable[Sample], started_ns: int, now_ns: int) -> Iterator[NumberDataPoint]:
    for sample in samples:
        yield NumberDataPoint(dict(sample.labels), started_ns, now_ns, sample.value)


def _histograms(samples: Iterable[Sample], started_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """The samples of one set of labels are its buckets in rising order, their count, and their sum."""
    bounds: list[float] = []
    counts: list[int] = []
    count = 0
    for sample in samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value) - sum(counts))
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        elif sample.name.endswith("_sum"):
            finite, counted, total = bounds[:-1], counts, sample.value
            bounds, counts = [], []
            yield HistogramDataPoint(
                dict(sample.labels), started_ns, now_ns, count, total, counted, finite, _UNKNOWN, _UNKNOWN
            )
