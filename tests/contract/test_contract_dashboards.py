"""Dashboards and alert rules ask for metrics and labels that exist, and are what their sources say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus_core.metrics.catalogue import CATALOGUE
from isthmus_core.metrics.definitions import Definition, Kind

FOLDER = Path(__file__).parents[2] / "deploy" / "observability"
RULES = FOLDER / "alerts.yaml"
SELECTOR = re.compile(r"(isthmus_[a-z0-9_]+)(?:\{([^}]*)\})?")
BY_NAME: dict[str, Definition] = {
    one.prometheus + suffix: one
    for one in CATALOGUE
    for suffix in (("_bucket", "_sum", "_count") if one.kind is Kind.HISTOGRAM else ("",))
}


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of every panel and rule."""
    for path in sorted((FOLDER / "grafana" / "dashboards").glob("*.json")):
        dashboard: dict[str, Any] = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def test_every_query_names_metrics_labels_and_values_that_exist():
    seen: set[str] = set()
    for where, expression in queries():
        for name, selector in SELECTOR.findall(expression):
            assert name in BY_NAME, f"{where}: {name}"
            labels = {label.name: label for label in BY_NAME[name].labels}
            seen.add(BY_NAME[name].name)
            for label, values in re.findall(r"(\w+)[=!]~?\"([^\"]*)\"", selector):
                assert label in labels, f"{where}: {name} has no label {label}"
                known = labels[label].values
                assert not known or set(values.split("|")) <= set(known), f"{where}: {label}"
        of_query = {label.name for name, _ in SELECTOR.findall(expression) for label in BY_NAME[name].labels}
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            wanted = {one.strip() for one in grouped.split(",")} - {"le", "instance", "job", "process"}
            assert wanted <= of_query, f"{where}: by ({grouped})"
    unshown = (
        {one.name for one in CATALOGUE} - seen - {"isthmus.request_prompt_tokens", "isthmus.request_generation_tokens"}
    )
    assert unshown == set(), "metrics that no dashboard shows"


def test_the_dashboards_are_what_their_source_makes():
    code = (
        "from dashboards import FOLDER, text\n"
        "from dashboard_list import DASHBOARDS\n"
        "wrong = [one.name for one in DASHBOARDS if (FOLDER / f'{one.name}.json').read_text() != text(one)]\n"
        "names = {path.stem for path in FOLDER.glob('*.json')} ^ {one.name for one in DASHBOARDS}\n"
        "print(*wrong, *names)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.split() == [], "run: python deploy/observability/dashboards.py"


def test_every_alert_is_documented():
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    page = (FOLDER.parents[1] / "docs" / "observability.md").read_text()
    assert set(re.findall(r"^\| `(Isthmus\w+)`", page, re.M)) == alerts


@pytest.mark.skipif(shutil.which("promtool") is None, reason="SKIPPED: no promtool (apt-get install prometheus)")
@pytest.mark.parametrize("command", [("check", "rules", "alerts.yaml"), ("test", "rules", "alerts_test.yaml")])
def test_the_alert_rules_are_valid_and_fire_when_they_should(command: tuple[str, ...]):
    result = subprocess.run(
        ["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
