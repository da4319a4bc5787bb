"""Services whose logs or spans can not go anywhere serve on; metrics reach an OTLP receiver and a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import pytest
from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_core.config import TelemetryConfig
from isthmus_core.metrics.services import REQUESTS, TIME_TO_FIRST_TOKEN
from isthmus_core.process import free_port
from isthmus_core.rpc import open_channel, wait_serving
from isthmus_core.telemetry import open_telemetry
from otlp import OtlpReceiver

pytestmark = pytest.mark.integration


@asynccontextmanager
async def coordinator(stderr: IO[bytes], *settings: str) -> AsyncGenerator[str, None]:
    """A coordinator process that serves; it must stop cleanly in the end."""
    address = f"127.0.0.1:{free_port()}"
    chosen = [f"coordinator.listen={address}", *settings]
    arguments = [part for one in chosen for part in ("--set", one)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "isthmus_coordinator", *arguments, stderr=stderr, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        serving = await wait_serving(address, 30)
        said = Path(stderr.name).read_text() if Path(stderr.name).is_file() else ""
        assert serving, f"not serving (exit code {process.returncode}): {said}"
        yield address
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def works(address: str) -> None:
    async with open_channel(address) as channel:
        stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
        await stub.GetCluster(coordinator_service_pb2.GetClusterRequest(), timeout=10)


@pytest.fixture(name="full_disk")
def _full_disk() -> Iterator[IO[bytes]]:
    with Path("/dev/full").open("wb") as disk:
        yield disk


async def test_a_full_disk_for_logs_does_not_stop_a_service(full_disk: IO[bytes]):
    port = free_port()
    async with coordinator(full_disk, f"telemetry.metrics_listen=127.0.0.1:{port}") as address:
        await works(address)
        text = await asyncio.to_thread(_read, f"http://127.0.0.1:{port}/metrics")
    (line,) = [line for line in text.splitlines() if line.startswith("isthmus_log_lines_lost_total ")]
    assert float(line.split()[1]) >= 1


async def test_an_unreachable_receiver_does_not_stop_a_service(tmp_path: Path):
    with (tmp_path / "log").open("wb") as log:
        endpoint = f"telemetry.otlp_endpoint=http://127.0.0.1:{free_port()}"
        async with coordinator(log, endpoint, "telemetry.push_metrics=true", "telemetry.push_interval_s=1") as address:
            await works(address)
            await asyncio.sleep(1.5)
            await works(address)
    text = (tmp_path / "log").read_text()
    assert text.count("metrics are not sent") == 1
    assert "Traceback" not in text
    assert "StatusCode.UNAVAILABLE" not in text


async def test_metrics_arrive_at_an_otlp_receiver():
    async with OtlpReceiver() as receiver:
        config = TelemetryConfig(otlp_endpoint=receiver.endpoint, push_metrics=True, push_interval_s=3600)
        telemetry = await asyncio.to_thread(open_telemetry, config, "router", {"service.instance.id": "r-0"})
        telemetry.metrics.add(REQUESTS, 4, "m", "ok")
        telemetry.metrics.record(TIME_TO_FIRST_TOKEN, 0.03, "m")
        await asyncio.to_thread(telemetry.shutdown)
    metrics = receiver.metrics
    assert metrics["isthmus.requests"].sum.is_monotonic
    (point,) = metrics["isthmus.requests"].sum.data_points
    assert point.as_double == 4
    (histogram,) = metrics["isthmus.time_to_first_token"].histogram.data_points
    assert (histogram.count, histogram.sum) == (1, 0.03)
    assert not histogram.HasField("min")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="SKIPPED: no prometheus (apt-get install prometheus)")
async def test_a_real_prometheus_scrapes_a_service(tmp_path: Path):
    port, own = free_port(), free_port()
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: i, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    with (tmp_path / "log").open("wb") as log:
        async with coordinator(log, f"telemetry.metrics_listen=127.0.0.1:{port}"):
            prometheus = await asyncio.create_subprocess_exec(
                "prometheus",
                f"--config.file={tmp_path}/prometheus.yml",
                f"--storage.tsdb.path={tmp_path}/data",
                f"--web.listen-address=127.0.0.1:{own}",
                stderr=log,
            )
            try:
                found = await _asked(f"http://127.0.0.1:{own}/api/v1/query?query=isthmus_build_info")
            finally:
                prometheus.terminate()
                await prometheus.wait()
    assert found["metric"]["component"] == "coordinator"
    assert found["value"][1] == "1"


async def _asked(url: str) -> dict:
    """The one result of a query, as soon as there is one."""
    for _ in range(150):
        try:
            answer = json.loads(await asyncio.to_thread(_read, url))
            if answer["data"]["result"]:
                return answer["data"]["result"][0]
        except OSError:
            pass  # it is only just starting
        await asyncio.sleep(0.2)
    raise AssertionError("Prometheus has no such series")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()
