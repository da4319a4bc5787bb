"""/metrics over HTTP, of this process or of several."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from isthmus_core.process import prove_port_free, split_address

# Label that tells the processes of one service apart.
PROCESS = "process"
_FETCH_S = 2.0


def open_registry() -> CollectorRegistry:
    """A registry with nothing but what the system knows about this process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> str:
    """The registry as Prometheus reads it."""
    return generate_latest(registry).decode()


class MetricsEndpoint:
    """`GET /metrics` on a thread of its own."""

    def __init__(self, address: str, registry: CollectorRegistry, field: str = "telemetry.metrics_listen") -> None:
        """Listens on host:port, 0 for a free one. Raises ConfigError, and StartError when the port is taken."""
        host, port = split_address(address, field)
        prove_port_free(host, port, field)
        started: tuple[WSGIServer, threading.Thread] = start_http_server(port, host, registry)
        self._server, self._thread = started
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Merged(Collector):
    def __init__(self, fetch: Callable[[], Mapping[str, str]]) -> None:
        self._fetch = fetch

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for process, text in self._fetch().items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={**sample.labels, PROCESS: process}))
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return []


def merged_registry(fetch: Callable[[], Mapping[str, str]]) -> CollectorRegistry:
    """The metrics of several processes as one: `fetch` gives the text of each one's /metrics by a name, which every
    sample gets as its label `process`. It is called on the endpoint's thread, once for every scrape."""
    registry = CollectorRegistry()
    registry.register(_Merged(fetch))
    return registry


def fetch_texts(ports: Mapping[str, int]) -> dict[str, str]:
    """What answers on these ports of this machine now; a process that does not answer is left out, as one that has
    ended."""
    texts: dict[str, str] = {}
    for name, port in ports.items():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=_FETCH_S) as answer:
                texts[name] = answer.read().decode()
        except OSError:
            continue
    return texts
