"""Telemetry of a process: a receiver that is not there costs one warning, a full disk costs log lines, nothing more."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
import urllib.request

import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry

from isthmus_core import span_export
from isthmus_core.config import TelemetryConfig, parse_config
from isthmus_core.errors import ConfigError, StartError
from isthmus_core.keys import RequestKey
from isthmus_core.logs import about
from isthmus_core.metrics import Metrics
from isthmus_core.metrics.push import metrics_data
from isthmus_core.metrics.services import REQUESTS, TIME_TO_FIRST_TOKEN
from isthmus_core.process import free_port
from isthmus_core.telemetry import open_telemetry
from isthmus_core.trace_context import TraceContext


def test_an_unreachable_receiver_is_one_warning_and_a_bounded_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(span_export, "MAX_PENDING", 50)
    endpoint = f"http://127.0.0.1:{free_port()}"
    unreachable = open_telemetry(TelemetryConfig(otlp_endpoint=endpoint, push_metrics=True), "router")
    caplog.set_level(logging.INFO, "isthmus_core")
    for _ in range(500):
        unreachable.tracing.begin_root("r", None).end()
    assert unreachable.tracing.dropped_spans() >= 400, "what does not fit is dropped"
    began = time.monotonic()
    unreachable.shutdown()
    assert time.monotonic() - began < 15, "a receiver that does not answer does not hold a process that stops"
    assert unreachable.tracing.dropped_spans() == 500
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len([one for one in warnings if "spans are lost" in one]) == 1
    assert len([one for one in warnings if "metrics are not sent" in one]) == 1
    assert len(warnings) == 2


def test_metrics_of_a_process_are_at_its_port_and_carry_its_build():
    telemetry = open_telemetry(TelemetryConfig(metrics_listen="127.0.0.1:0"), "router")
    try:
        telemetry.metrics.add(REQUESTS, 1, "m", "ok")
        with urllib.request.urlopen(f"http://127.0.0.1:{telemetry.metrics_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    finally:
        telemetry.shutdown()
    assert 'isthmus_requests_total{model="m",outcome="ok"} 1.0' in text
    assert 'isthmus_build_info{component="router",' in text
    assert "process_resident_memory_bytes" in text
    assert "isthmus_spans_dropped_total 0.0" in text


def test_a_taken_port_and_a_wrong_address_are_said_at_the_start():
    taken = open_telemetry(TelemetryConfig(metrics_listen="127.0.0.1:0"), "router")
    with pytest.raises(StartError, match="metrics_listen"):
        open_telemetry(TelemetryConfig(metrics_listen=f"127.0.0.1:{taken.metrics_port}"), "router")
    taken.shutdown()
    with pytest.raises(ConfigError, match="metrics_listen"):
        open_telemetry(TelemetryConfig(metrics_listen="9464"), "router")
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        parse_config({"telemetry": {"push_metrics": True}})


def test_pushed_metrics_are_what_was_counted():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.add(REQUESTS, 3, "m", "ok")
    for value in (0.003, 0.003, 0.7, 9999):
        metrics.record(TIME_TO_FIRST_TOKEN, value, "m")
    data = metrics_data(registry, Resource.get_empty(), 1, 2)
    found = {one.name: one for one in data.resource_metrics[0].scope_metrics[0].metrics}
    (count,) = found["isthmus.requests"].data.data_points
    assert (count.value, count.attributes) == (3, {"model": "m", "outcome": "ok"})
    assert found["isthmus.requests"].unit == "{request}"
    (histogram,) = found["isthmus.time_to_first_token"].data.data_points
    assert histogram.count == sum(histogram.bucket_counts) == 4
    assert len(histogram.bucket_counts) == len(histogram.explicit_bounds) + 1
    by_bound = dict(zip((*histogram.explicit_bounds, "more"), histogram.bucket_counts, strict=True))
    assert (by_bound[0.005], by_bound[0.75], by_bound["more"]) == (2, 1, 1)
    assert histogram.sum == pytest.approx(9999.706)


LINES = """
import logging, sys
from isthmus_core.config import LoggingConfig
from isthmus_core.logs import setup_logging, lost_lines
setup_logging(LoggingConfig(format="json"), "router")
for number in range(3):
    logging.getLogger("x").info("line %d", number)
print(lost_lines())
"""


def test_a_full_disk_loses_lines_and_counts_them():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", LINES], stdout=subprocess.PIPE, stderr=full, timeout=30, check=False
        )
    assert result.returncode == 0
    assert result.stdout.strip() == b"3"


RECOVERS = """
import logging, os, sys
from isthmus_core.config import LoggingConfig
from isthmus_core.logs import setup_logging
setup_logging(LoggingConfig(), "router")
disk = os.dup(2)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
logging.getLogger("x").info("lost")
os.dup2(disk, 2)
logging.getLogger("x").info("written")
"""


def test_lost_lines_are_reported_when_there_is_room_again():
    result = subprocess.run([sys.executable, "-c", RECOVERS], capture_output=True, text=True, timeout=30, check=False)
    assert "written" in result.stderr
    assert "1 log lines before this one could not be written" in result.stderr


def test_fields_about_a_request():
    key = RequestKey(1 << 40, 2)
    trace = TraceContext(b"\1" * 16, b"\2" * 8)
    fields = about(key, trace, peer="c-0", reason=None)
    assert fields == {"request_id": 1 << 40, "attempt": 2, "trace_id": "01" * 16, "peer": "c-0"}
    assert json.loads(json.dumps(fields)) == fields
    assert "trace_id" not in about(key)
