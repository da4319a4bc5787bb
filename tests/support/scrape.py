"""Metrics and logs of a running cluster's processes, as an operator would look at them."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from isthmus_client.supervisor import LocalCluster

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def log_lines(cluster: LocalCluster, process: str) -> list[dict[str, Any]]:
    """The JSON lines of a process; lines that are none are what libraries print."""
    lines = cluster.process(process).log_path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def port_in(log: str, who: str) -> int:
    """Where a process with `telemetry.metrics_listen: 127.0.0.1:0` serves its metrics, as its log says."""
    found = re.search(r"metrics at port (\d+)", log)
    assert found is not None, f"{who} does not say where its metrics are:\n{log[-2000:]}"
    return int(found.group(1))


def metrics_port(cluster: LocalCluster, process: str) -> int:
    """The same of a process of a cluster."""
    return port_in(cluster.process(process).log_path.read_text(errors="replace"), process)


def _get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


async def scrape_text(cluster: LocalCluster, process: str) -> str:
    """/metrics of a process."""
    return await asyncio.to_thread(_get, metrics_port(cluster, process))


def _samples(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples


async def scrape(cluster: LocalCluster, process: str) -> Samples:
    """The same as sample name -> labels -> value."""
    return _samples(await scrape_text(cluster, process))


async def scrape_port(port: int) -> Samples:
    """Of the process with its metrics there."""
    return _samples(await asyncio.to_thread(_get, port))


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over every series of a metric that has these labels."""
    wanted = set(labels.items())
    return sum(value for key, value in samples.get(name, {}).items() if wanted <= key)
