"""The instruments of one process.

They are prometheus_client's: an addition takes 0.4 µs and a histogram 0.8 µs, those of the OpenTelemetry SDK 5 µs each,
which is more than a router can spend on every request. `push` sends the same registry as OTLP.

Label sets are bounded whatever is put in: an unknown value of an enumerated label, and one more value than the label's
limit allows, become `other`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from isthmus_core.metrics.definitions import OTHER, Definition, Kind, Label

# Label values in the order of the definition, value.
Observed = Mapping[tuple[str, ...], float]
_Read = Callable[[], Observed | float]

# When each series began: twice the number of series for nothing that anybody here asks.
disable_created_metrics()


class BoundedLabels:
    """The label values of one metric, of which there are never more than its definition allows."""

    def __init__(self, labels: tuple[Label, ...]) -> None:
        self._labels = labels
        self._seen: list[set[str]] = [set(label.values) for label in labels]

    def bound(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """The values, those that are too many or unknown as `other`. Raises ValueError for a wrong number of them."""
        if len(values) != len(self._labels):
            names = ", ".join(label.name for label in self._labels) or "no labels"
            raise ValueError(f"{len(values)} label values {values}; this metric has {names}")
        return tuple(map(self._bound, range(len(values)), values))

    def _bound(self, index: int, value: str) -> str:
        label, seen = self._labels[index], self._seen[index]
        if value in seen or value == OTHER:
            return value
        if label.values or len(seen) >= label.limit:
            return OTHER
        seen.add(value)
        return value


class _Series:
    """One counter or histogram: a function for each set of label values."""

    def __init__(self, definition: Definition, registry: CollectorRegistry) -> None:
        names = [label.name for label in definition.labels]
        name, text = definition.prometheus, definition.help
        if definition.kind is Kind.COUNTER:
            self._metric: Counter | Histogram = Counter(name, text, names, registry=registry)
        else:
            self._metric = Histogram(name, text, names, registry=registry, buckets=definition.buckets)
        self._labels = BoundedLabels(definition.labels)
        self._made: dict[tuple[str, ...], Callable[[float], None]] = {}

    def at(self, values: tuple[str, ...]) -> Callable[[float], None]:
        return self._made.get(values) or self._make(values)

    def _make(self, values: tuple[str, ...]) -> Callable[[float], None]:
        bounded = self._labels.bound(values)
        child = self._metric.labels(*bounded) if bounded else self._metric
        made = child.inc if isinstance(child, Counter) else child.observe
        if bounded == values:  # an unknown value must not make this grow either
            self._made[values] = made
        return made


class _Observed(Collector):
    """A metric that is looked at when it is collected."""

    def __init__(self, definition: Definition, read: _Read) -> None:
        self._definition, self.read = definition, read
        self._labels = BoundedLabels(definition.labels)

    def collect(self) -> Iterable[Metric]:
        definition = self._definition
        family = CounterMetricFamily if definition.kind is Kind.OBSERVED_COUNTER else GaugeMetricFamily
        metric = family(definition.prometheus, definition.help, labels=[one.name for one in definition.labels])
        value = self.read()
        observed: Observed = {(): value} if isinstance(value, int | float) else value
        sums: dict[tuple[str, ...], float] = {}
        for key, one in observed.items():
            bounded = self._labels.bound(key)
            sums[bounded] = sums.get(bounded, 0.0) + one
        for key, one in sums.items():
            metric.add_metric(key, one)
        yield metric

    def describe(self) -> Iterable[Metric]:
        return [Metric(self._definition.prometheus.removesuffix("_total"), self._definition.help, "unknown")]


class Metrics:
    """Metrics of one process. Thread-safe. Without a registry nothing is counted."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry
        self._series: dict[str, _Series] = {}
        self._observed: dict[str, _Observed] = {}
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """True when somebody can read them."""
        return self._registry is not None

    def add(self, definition: Definition, value: float, *labels: str) -> None:
        """Count `value` more. `labels` in the order of the definition."""
        if self._registry is not None:
            _require(definition, Kind.COUNTER)
            series = self._series.get(definition.name) or self._create(definition, self._registry)
            series.at(labels)(value)

    def record(self, definition: Definition, value: float, *labels: str) -> None:
        """One more value of a distribution."""
        if self._registry is not None:
            _require(definition, Kind.HISTOGRAM)
            series = self._series.get(definition.name) or self._create(definition, self._registry)
            series.at(labels)(value)

    def observe(self, definition: Definition, read: _Read) -> None:
        """Call `read` whenever metrics are collected, on the collecting thread: it must only look at plain values.

        It returns the value, or for a metric with labels a mapping from label values to values. Another `read` for the
        same metric takes the place of the one before.
        """
        _require(definition, Kind.GAUGE, Kind.OBSERVED_COUNTER)
        if self._registry is None:
            return
        known = self._observed.get(definition.name)
        if known is not None:
            known.read = read
            return
        observed = self._observed[definition.name] = _Observed(definition, read)
        self._registry.register(observed)

    def _create(self, definition: Definition, registry: CollectorRegistry) -> _Series:
        with self._lock:
            if definition.name not in self._series:
                self._series[definition.name] = _Series(definition, registry)
            return self._series[definition.name]


def _require(definition: Definition, *kinds: Kind) -> None:
    if definition.kind not in kinds:
        wanted = " or ".join(kind.value for kind in kinds)
        raise ValueError(f"{definition.name} is a {definition.kind.value}, not a {wanted}")


NO_METRICS = Metrics()
