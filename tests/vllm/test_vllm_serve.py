"""Plain `vllm serve` with a hub beside it, behind the smallest proxy: nothing else of this repository runs. Nightly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from isthmus_core.process import free_port
from vllm_world import ENVIRONMENT, ROOT, VLLM_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(1800)]

CONNECTOR = (
    '{"kv_connector": "IsthmusConnector", "kv_connector_module_path": "kvtransfer.integrations.vllm.connector", '
    '"kv_role": "%s", "kv_load_failure_policy": "recompute", '
    '"kv_connector_extra_config": {"repack": %s, "staging_policy": "always"}}'
)


@contextlib.contextmanager
def process(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ended with its whole session."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            [str(one) for one in command],
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def serving(url: str, timeout_s: float = 900.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code < 500:
                return
        time.sleep(0.5)
    raise TimeoutError(url)


@pytest.mark.parametrize(("repack", "decode_block"), [("true", 32), ("false", 128)])
def test_a_proxy_gets_the_text_of_one_server(model: Path, tmp_path: Path, repack: str, decode_block: int):
    ports = [free_port() for _ in range(5)]
    with contextlib.ExitStack() as stack:
        for role, kv_role, hub, http, block in (
            ("context", "kv_producer", ports[0], ports[1], 128),
            ("generation", "kv_consumer", ports[2], ports[3], decode_block),
        ):
            command = [
                *(VLLM_PYTHON, "-m", "kvtransfer.sidecar", "--role", role, "--listen", f"127.0.0.1:{hub}"),
                *("--state-dir", tmp_path / "state", "--", ROOT / ".venv-vllm/bin/vllm", "serve", model),
                *("--port", str(http), "--host", "127.0.0.1", "--served-model-name", "m", "--dtype", "float32"),
                *("--enforce-eager", "--max-model-len", "2048", "--block-size", str(block)),
                *("--kv-transfer-config", CONNECTOR % (kv_role, repack)),
            ]
            stack.enter_context(process(tmp_path / f"{role}.log", *command))
        urls = [f"http://127.0.0.1:{port}" for port in (ports[1], ports[3])]
        proxy = (sys.executable, ROOT / "examples/vllm_proxy.py", "--prefill", urls[0], "--decode", urls[1])
        stack.enter_context(process(tmp_path / "proxy.log", *proxy, "--port", str(ports[4])))
        for url in urls:
            serving(f"{url}/health")
        serving(f"http://127.0.0.1:{ports[4]}/v1/completions")
        for prompt in ("The capital of France is", "Once upon a time " * 70):
            body = {"model": "m", "prompt": prompt, "max_tokens": 20, "temperature": 0}
            whole, split = (
                httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
                for url in (urls[0], f"http://127.0.0.1:{ports[4]}")
            )
            assert split == whole
    for role in ("context", "generation"):
        assert "not fetched" not in (tmp_path / f"{role}.log").read_text(errors="replace")
