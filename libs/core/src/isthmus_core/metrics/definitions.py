"""How a metric is defined: name, unit, labels with a bounded set of values, buckets. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# A label value outside of the declared ones, or one more than `limit` allows.
OTHER = "other"


class Kind(Enum):
    """What a metric counts."""

    # Only grows; `Metrics.add`.
    COUNTER = "counter"
    # Distribution; `Metrics.record`.
    HISTOGRAM = "histogram"
    # Looked at when it is collected; `Metrics.observe`.
    GAUGE = "gauge"
    # Only grows, and somebody else counts; `Metrics.observe`.
    OBSERVED_COUNTER = "observed counter"


@dataclass(frozen=True, slots=True)
class Label:
    """A label. Either all its `values` are known, or at most `limit` different ones are told apart."""

    name: str
    values: tuple[str, ...] = ()
    limit: int = 0

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.limit):
            raise ValueError(f"label {self.name}: give either values or a limit")

    @property
    def most(self) -> int:
        """Largest number of values, `other` included."""
        return (len(self.values) or self.limit) + 1


# UCUM units and what Prometheus calls them.
_UNITS = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second", "1": "ratio"}


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric. `name` as OpenTelemetry has it; `unit` in UCUM ({...} for things that are counted); `buckets`: upper
    bounds of a histogram; `services`: who has it."""

    name: str
    kind: Kind
    unit: str
    help: str
    services: tuple[str, ...]
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name at the Prometheus endpoint; histograms have _bucket, _sum and _count behind it."""
        name = self.name.replace(".", "_")
        unit = _UNITS.get(self.unit, "")
        if unit and not name.endswith(f"_{unit}"):
            name += f"_{unit}"
        return f"{name}_total" if self.kind in (Kind.COUNTER, Kind.OBSERVED_COUNTER) else name


# Field-standard buckets (those of vLLM), so that dashboards can compare engines.
TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# A control hop takes 0.1 ms, a hand-off 1 ms to some seconds.
HANDOFF_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# From an emulated copy over TCP (0.1 GB/s) to a peer copy inside one machine.
RATE_BYTES_PER_S = (1e7, 1e8, 3e8, 1e9, 3e9, 1e10, 2e10, 5e10, 1e11, 2e11, 3e11, 4e11)
TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
RATIO = (0.1, 0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0, 10.0)
