"""docs/observability.md names what the code emits, no more and no less; metrics have a use in the code."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from isthmus_core.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "observability.md"
METRIC_MODULES = ROOT / "libs/core/src/isthmus_core/metrics"
NAME = re.compile(r"(isthmus|gen_ai|kv)(\.[a-z_]+)+")
SPANS = re.compile(r"(kv|worker|coordinator|prefill|queue|decode|route|consensus)(\.[a-z_]+)?")


def _sources() -> Iterator[Path]:
    for folder in ("libs/core", "libs/kvtransfer", "services"):
        for path in (ROOT / folder).glob("**/src/**/*.py"):
            if METRIC_MODULES not in path.parents:
                yield path


def _strings() -> set[str]:
    """Every string constant of the sources, the ends of f-strings included."""
    return {
        node.value
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def _documented() -> tuple[set[str], set[str]]:
    """(attributes, events) of the page."""
    text = PAGE.read_text()
    attributes = text[text.index("### Attributes") : text.index("### Without a backend")]
    events = text[text.index("| event |") : text.index("### Attributes")]
    first = re.compile(r"^\| `([^`]+)` \|", re.M)
    return set(first.findall(attributes)), set(first.findall(events))


def test_attributes_and_events_are_documented():
    strings, (attributes, events) = _strings(), _documented()
    ranges = {"kv.plan", "kv.post", "kv.gather", "kv.scatter"}
    spans = {"kv.receive", "kv.transfer"}
    emitted = {text for text in strings if NAME.fullmatch(text)} - ranges - spans
    assert emitted - attributes == set(), "emitted and not in docs/observability.md"
    assert attributes - emitted - {"error.type"} == set(), "in docs/observability.md and not emitted"
    assert events <= strings


def test_every_metric_is_counted_somewhere():
    code = "\n".join(path.read_text() for path in _sources())
    names = {
        id(value): name
        for module in ("services", "workers")
        for name, value in vars(__import__(f"isthmus_core.metrics.{module}", fromlist=["x"])).items()
    }
    unused = [one.name for one in CATALOGUE if not re.search(rf"\b{names[id(one)]}\b", code)]
    assert unused == []


def test_the_table_of_metrics_is_the_catalogue():
    tool = runpy.run_path(str(ROOT / "tools" / "metrics_table.py"))
    text = PAGE.read_text()
    assert tool["render_page"](text) == text, "run: python tools/metrics_table.py"
