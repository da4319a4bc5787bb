"""What goes wrong around a cluster of real processes: typed errors, exits with the reason, nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client
from isthmus_core.errors import IsthmusError
from isthmus_core.process import free_port
from tiny_models import tiny_llama

pytestmark = pytest.mark.timeout(120)
ISTHMUS = Path(sys.executable).parent / "isthmus"
SLOW = {"engine": {"mock": {"decode_us": 20_000}}}


def _isthmus(*arguments: str, folder: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(folder)}
    return subprocess.run(
        [ISTHMUS, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def _service(name: str, *overrides: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"isthmus_{name}"]
    for override in overrides:
        command += ["--set", override]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize("victim", ["context-0", "generation-0"])
async def test_a_worker_killed_mid_request_is_a_typed_error_and_the_cluster_goes_on(tmp_path: Path, victim: str):
    prefill = {"engine": {"mock": {"prefill_us_per_token": 5_000}}} if victim == "context-0" else SLOW
    options = replace(MOCK, base={**prefill, "worker": {"drain_s": 2}})
    async with (
        running_cluster(options, tmp_path, restart=True, clean=False) as cluster,
        Client(cluster.grpc_endpoint) as client,
    ):
        stopping = asyncio.Event()
        keeping = asyncio.create_task(cluster.supervise(stopping))
        asking = asyncio.create_task(client.answer([65] * 400, max_tokens=400, timeout_s=60))
        await asyncio.sleep(1.0)
        assert not asking.done()
        cluster.process(victim).signal_group(signal.SIGKILL)
        with pytest.raises(IsthmusError) as caught:
            await asking
        assert caught.value.code.name == "UNAVAILABLE"
        assert victim in caught.value.message
        # The supervisor starts the worker again; requests are refused until the pair is ready, then served.
        while True:
            try:
                answer = await client.answer([66] * 10, max_tokens=4, timeout_s=30)
                break
            except IsthmusError as error:
                assert error.code.name == "UNAVAILABLE"  # noqa: PT017 - retried below
                await asyncio.sleep(0.2)
        assert answer.end.completion_tokens == 4
        await assert_idle(cluster)
        stopping.set()
        await keeping


async def test_an_engine_killed_mid_request_frees_the_other_side(tmp_path: Path):
    options = replace(MOCK, base=SLOW)
    async with running_cluster(options, tmp_path, clean=False) as cluster, Client(cluster.grpc_endpoint) as client:
        asking = asyncio.create_task(client.answer([65] * 100, max_tokens=400, timeout_s=60))
        await asyncio.sleep(1.0)
        engines = psutil.Process(cluster.process("generation-0").pid).children(recursive=True)
        assert engines
        for engine in engines:
            engine.kill()
        with pytest.raises(IsthmusError) as caught:
            await asking
        assert caught.value.code.name == "UNAVAILABLE"
        await cluster.process("generation-0").wait()
        await assert_idle(cluster)


def test_a_taken_port_is_named_before_anything_is_spawned(tmp_path: Path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        result = _isthmus("up", "--engine", "mock", "--grpc-port", port, folder=tmp_path)
    assert result.returncode == 3
    assert f"--grpc-port = 127.0.0.1:{port}" in result.stderr
    assert not list(tmp_path.rglob("*.log"))


def test_an_unknown_setting_names_the_nearest_known_one(tmp_path: Path):
    settings = tmp_path / "s.yaml"
    settings.write_text("engine:\n  max_runing: 4\n")
    result = _isthmus("up", "--engine", "mock", "--config", str(settings), folder=tmp_path)
    assert result.returncode == 2
    assert "engine.max_runing; did you mean engine.max_running?" in result.stderr


def _tiny(folder: Path) -> Path:
    return tiny_llama(folder / "tiny")


def _other_architecture(folder: Path) -> Path:
    config = _tiny(folder) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["MambaForCausalLM"]}))
    return config.parent


def _corrupt_weights(folder: Path) -> Path:
    weights = _tiny(folder) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return weights.parent


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "absent", "neither 'default', nor an existing folder, nor ORG/NAME"),
        (_other_architecture, "MambaForCausalLM"),
        (_corrupt_weights, "model.safetensors"),
    ],
)
def test_a_model_that_can_not_be_served_is_refused_with_the_reason(
    tmp_path: Path, make: Callable[[Path], Path], words: str
):
    ports = ("--grpc-port", "0", "--http-port", "0", "--coordinator-port", "0")
    result = _isthmus("up", "--model", str(make(tmp_path)), *ports, folder=tmp_path / "state")
    assert result.returncode in (2, 3), result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("service", ["router", "worker"])
def test_a_service_without_its_coordinator_leaves_with_the_reason(tmp_path: Path, service: str):
    absent = f"127.0.0.1:{free_port()}"
    overrides = [
        f"{service}.coordinator={absent}",
        f"{service}.start_timeout_s=2",
        "model.name=mock",
        "model.tokenizer=byte",
        "engine.kind=mock",
        "engine.num_blocks=64",
        "transfer.backend=nixl",
        "router.listen=127.0.0.1:0",
        "router.http_listen=127.0.0.1:0",
        f"worker.state_dir={tmp_path}",
    ]
    result = _service(service, *overrides)
    assert result.returncode == 3, result.stderr
    assert absent in result.stderr


def test_a_split_worker_without_a_transfer_backend_says_what_to_write():
    result = _service("worker", "worker.role=context", "engine.kind=mock", "model.name=mock", "model.tokenizer=byte")
    assert result.returncode == 2
    assert "transfer" in result.stderr
    assert "backend" in result.stderr


def test_no_process_survives_a_killed_command(tmp_path: Path):
    command = [ISTHMUS, "up", "--engine", "mock", "--grpc-port", "0", "--http-port", "0", "--coordinator-port", "0"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Ctrl-C"):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 6
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_down_stops_what_up_started(tmp_path: Path):
    command = [ISTHMUS, "up", "--engine", "mock", "--grpc-port", "0", "--http-port", "0", "--coordinator-port", "0"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("Ctrl-C"):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        _run_printed_lines(lines)
        began = time.monotonic()
        result = _isthmus("down", folder=tmp_path)
        assert "stopped 1 cluster" in result.stdout, result.stderr
        assert process.wait(30) == 0
        assert time.monotonic() - began < 60
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
    finally:
        process.kill()
        process.communicate()


def _run_printed_lines(lines: list[str]) -> None:
    """The curl and grpcurl lines that `up` prints work when pasted."""
    environment = {**os.environ, "PATH": f"{ISTHMUS.parent}:{os.environ['PATH']}"}
    for tool, expected in (("curl", "chat.completion"), ("grpcurl", "finished")):
        (line,) = [line for line in lines if line.startswith(f"{tool} ")]
        result = subprocess.run(
            ["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout
