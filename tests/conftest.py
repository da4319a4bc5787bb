"""Shared by all tests: `tests/support` is importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported, here and in every process that a test starts: tests share the cores with each other, and
# more threads than cores make the small matrices of the tests ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Machines are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("isthmus", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("isthmus")
sys.path.insert(0, str(Path(__file__).parent / "support"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nightly tests run only where they are asked for: `pytest -m nightly`. Those for a GPU say that there is none."""
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in for_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch sees"))
    if "nightly" in str(config.option.markexpr):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    config.hook.pytest_deselected(items=nightly)
    items[:] = [item for item in items if not item.get_closest_marker("nightly")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a test has failed with that passed when it was repeated (`RERUNS`): a bug to mend."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first failure of {report.nodeid}")
        terminalreporter.line(report.longreprtext)
