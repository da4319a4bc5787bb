"""The kernels of the chunks, by Triton's interpreter: their arithmetic without a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.integration

SCRIPT = """
import sys
import torch
from bounce_case import PAIRS, BounceCase
from kvtransfer.bounce import cuda_copying
from kvtransfer.bounce.copying import FINISHED


class OnHost:
    def can(self, packed):
        return packed.whole_bytes

    def warm(self, runs, *, gather):
        pass

    def prepare(self, packed):
        pass

    def _copy(self, packed, part, gather):
        for grid in packed.grids:
            device = torch.device("cpu")
            there = cuda_copying.grid_on(device, grid, cuda_copying.runs_on(device, grid.runs))
            cuda_copying.launch(grid, there, part, gather=gather)
        return FINISHED

    def gather(self, packed, begin, end, chunk):
        return self._copy(packed, (begin, end, chunk), True)

    def scatter(self, packed, begin, end, chunk):
        return self._copy(packed, (begin, end, chunk), False)


for name in PAIRS:
    for parts in (1, 3):
        case = BounceCase(name)
        expected = case.expected()
        if case.bounce(OnHost(), parts) != expected:
            sys.exit(f"{name} in {parts} parts: other bytes")
"""


@pytest.mark.timeout(120)
def test_the_kernels_move_what_a_direct_write_moves():
    support = Path(__file__).parents[1] / "support"
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join([str(support), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
