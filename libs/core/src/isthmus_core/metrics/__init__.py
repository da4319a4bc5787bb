"""Metrics: what there is (`catalogue`), counting it (`Metrics`), and where Prometheus finds it."""

from isthmus_core.metrics.definitions import Definition, Kind, Label
from isthmus_core.metrics.meter import NO_METRICS, Metrics

__all__ = ["NO_METRICS", "Definition", "Kind", "Label", "Metrics"]
