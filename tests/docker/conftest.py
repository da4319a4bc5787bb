"""Tests of images and compose file. They need a Docker engine with compose: tools/start_docker.sh brings one."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def _missing() -> str | None:
    """Why there can be no container here, or None."""
    if shutil.which("docker") is None:
        return "no docker command"
    for command in (["docker", "info"], ["docker", "compose", "version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        if done.returncode != 0:
            return f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The one place where they are skipped, and loudly."""
    ours = [item for item in items if "tests/docker" in item.path.as_posix()]
    reason = _missing() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.docker)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"NO DOCKER ENGINE ({reason}): run tools/start_docker.sh"))
