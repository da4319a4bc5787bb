"""Router, coordinator, client and the worker's hub run without torch and nixl although both are installed.

Each service runs for real until it is ready; a `sitecustomize` module on its path then writes what it has imported.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import MOCK, running_cluster

FORBIDDEN = {"torch", "nixl_cu12", "nixl_cu13", "nixl", "safetensors"}
# Any process of the cluster answers SIGUSR2 with the list of its modules.
SPY = """
import json, os, signal, sys
def dump(number, frame):
    folder = os.environ["ISTHMUS_SPY"]
    path = os.path.join(folder, str(os.getpid()))
    with open(path + ".part", "w") as file:
        json.dump(sorted(sys.modules), file)
    os.rename(path + ".part", path + ".json")
signal.signal(signal.SIGUSR2, dump)
"""


def test_torch_is_installed():
    assert importlib.util.find_spec("torch"), "this file proves nothing without torch"


async def test_services_run_to_readiness_without_torch(tmp_path: Path):
    import asyncio
    import signal

    spy = tmp_path / "spy"
    spy.mkdir()
    (spy / "sitecustomize.py").write_text(SPY)
    environment = {"PYTHONPATH": str(spy), "ISTHMUS_SPY": str(spy)}
    async with running_cluster(MOCK, tmp_path, environment=environment) as cluster:
        for name in ("coordinator", "router", "context-0", "generation-0"):
            child = cluster.process(name)
            child.signal(signal.SIGUSR2)
            answer = spy / f"{child.pid}.json"
            while not answer.exists():
                await asyncio.sleep(0.02)
            modules = set(json.loads(answer.read_text()))
            assert "isthmus_core.config" in modules, "the spy did not look at the service itself"
            assert not FORBIDDEN & modules, f"{name} imports {sorted(FORBIDDEN & modules)}"


@pytest.mark.parametrize("module", ["isthmus_core.rpc", "isthmus_client.cli", "isthmus_client"])
def test_libraries_import_without_torch(module: str):
    code = f"import {module}, sys; print(sorted({FORBIDDEN!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.strip() == "[]"
