"""Metrics: what is counted is what Prometheus reads, and label sets stay bounded whatever is put in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from isthmus_core.metrics import NO_METRICS, Definition, Kind, Label, Metrics
from isthmus_core.metrics.catalogue import CATALOGUE
from isthmus_core.metrics.prometheus import merged_registry, render

COLOUR = Label("colour", ("red", "green"))
NAME = Label("name", limit=2)
COUNT = Definition("t.things", Kind.COUNTER, "{thing}", "Things.", ("router",), (COLOUR, NAME))
TIME = Definition("t.wait", Kind.HISTOGRAM, "s", "Waits.", ("router",), (), (0.1, 1.0))
LEVEL = Definition("t.level", Kind.GAUGE, "1", "Level.", ("router",), (COLOUR,))
LOST = Definition("t.lost", Kind.OBSERVED_COUNTER, "{line}", "Lost.", ("router",))


def samples(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(render(registry))
        for sample in family.samples
    }


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


def test_counters_histograms_and_observed_values_arrive():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add(COUNT, 2, "red", "a")
    metrics.add(COUNT, 3, "red", "a")
    for wait in (0.05, 0.5, 5):
        metrics.record(TIME, wait)
    metrics.observe(LEVEL, lambda: {("red",): 0.25, ("green",): 0.5})
    metrics.observe(LOST, lambda: 6)
    metrics.observe(LOST, lambda: 7)  # takes its place
    got = samples(registry)
    assert got["t_things_total", labels(colour="red", name="a")] == 5
    assert got["t_wait_seconds_bucket", labels(le="0.1")] == 1
    assert got["t_wait_seconds_bucket", labels(le="1.0")] == 2
    assert got["t_wait_seconds_bucket", labels(le="+Inf")] == 3
    assert got["t_wait_seconds_sum", labels()] == pytest.approx(5.55)
    assert got["t_level_ratio", labels(colour="green")] == 0.5
    assert got["t_lost_total", labels()] == 7


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), max_size=40))
def test_no_input_makes_more_series_than_the_labels_allow(pairs: list[tuple[str, str]]):
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for colour, name in pairs:
        metrics.add(COUNT, 1, colour, name)
    observed = {(colour,): 1.0 for colour, _ in pairs}
    metrics.observe(LEVEL, lambda: observed)
    got = samples(registry)
    counted = [key for key in got if key[0] == "t_things_total"]
    assert len(counted) <= COLOUR.most * NAME.most
    assert math.isclose(sum(got[key] for key in counted), len(pairs)), "nothing is lost by it"
    assert len([key for key in got if key[0] == "t_level_ratio"]) <= COLOUR.most
    assert sum(value for key, value in got.items() if key[0] == "t_level_ratio") == len(observed)


def test_the_first_values_of_a_limited_label_keep_their_names():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for name in ("a", "b", "c", "d", "a"):
        metrics.add(COUNT, 1, "red", name)
    got = samples(registry)
    names = {dict(key[1])["name"]: value for key, value in got.items() if key[0] == "t_things_total"}
    assert names == {"a": 2, "b": 1, "other": 2}


def test_misuse_is_refused():
    metrics = Metrics(CollectorRegistry())
    with pytest.raises(ValueError, match="colour, name"):
        metrics.add(COUNT, 1, "red")
    with pytest.raises(ValueError, match="counter"):
        metrics.record(COUNT, 1, "red", "a")
    with pytest.raises(ValueError, match="histogram"):
        metrics.observe(TIME, lambda: 1)
    with pytest.raises(ValueError, match="limit"):
        Label("both", ("a",), 3)
    with pytest.raises(ValueError, match="limit"):
        Label("neither")


def test_without_a_registry_nothing_happens():
    NO_METRICS.add(COUNT, 1, "wrong number of labels")
    NO_METRICS.observe(LEVEL, lambda: 1 / 0)
    assert not NO_METRICS.enabled


def test_several_processes_as_one():
    texts: dict[str, str] = {}
    for number, count in enumerate((2, 5)):
        registry = CollectorRegistry()
        metrics = Metrics(registry)
        metrics.add(COUNT, count, "red", "a")
        metrics.record(TIME, 0.5)
        texts[str(number)] = render(registry)
    got = samples(merged_registry(lambda: texts))
    assert got["t_things_total", labels(colour="red", name="a", process="0")] == 2
    assert got["t_things_total", labels(colour="red", name="a", process="1")] == 5
    assert got["t_wait_seconds_count", labels(process="1")] == 1
    assert samples(merged_registry(dict)) == {}


def test_the_catalogue_is_well_formed():
    names = [one.name for one in CATALOGUE]
    assert len(names) == len(set(names))
    assert len({one.prometheus for one in CATALOGUE}) == len(names)
    for one in CATALOGUE:
        assert one.name.startswith("isthmus.")
        assert one.help.endswith(".") or one.name == "isthmus.build_info"
        assert bool(one.buckets) == (one.kind is Kind.HISTOGRAM), one.name
        assert list(one.buckets) == sorted(set(one.buckets)), one.name
        assert set(one.services) <= {"router", "coordinator", "worker"}
        series = math.prod(label.most for label in one.labels)
        assert series <= 2000, f"{one.name} may have {series} series"


def test_every_metric_can_be_rendered():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for one in CATALOGUE:
        values = [label.values[0] if label.values else "x" for label in one.labels]
        if one.kind is Kind.COUNTER:
            metrics.add(one, 1, *values)
        elif one.kind is Kind.HISTOGRAM:
            metrics.record(one, 1, *values)
        else:
            metrics.observe(one, lambda values=tuple(values): {values: 1.0})
    found = {name for name, _ in samples(registry)}
    for one in CATALOGUE:
        suffix = "_count" if one.kind is Kind.HISTOGRAM else ""
        assert one.prometheus + suffix in found
