"""The executor's thread steps on while 256 MiB are written over real NIXL by the agent's thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rank_process import needs_nixl

pytestmark = [pytest.mark.integration, needs_nixl]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "agent_jitter.py"


def test_steps_go_on_while_a_large_write_is_in_flight(tmp_path: Path):
    found = tmp_path / "rows.json"
    environment = {**os.environ, "UCX_MODULES": "^ib", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr.decode()
    rows = {row["name"]: row["value"] for row in json.loads(found.read_text())}
    # A post that held the interpreter or the thread would leave a handful: one before and one after each write.
    assert rows["steps while a write was in flight"] > 100
