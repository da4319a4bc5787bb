"""deploy/compose.yaml as tests drive it: a project of its own, free ports, the same files a user has."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]
SERVICES = ("coordinator", "router", "context", "generation")


def docker(*arguments: str, timeout_s: float = 60) -> str:
    """stdout of a docker command. Raises RuntimeError with its stderr."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr[-4000:]}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Project:
    """One project of the compose file. `environment` overrides deploy/.env."""

    name: str
    environment: Mapping[str, str]

    def compose(self, *arguments: str, timeout_s: float = 480) -> str:
        """stdout of a compose command. Raises RuntimeError with its stderr."""
        files = ("deploy/compose.yaml", "tests/docker/compose.test.yaml")
        command = ["docker", "compose", "--project-directory", "deploy", "--project-name", self.name]
        for file in files:
            command += ["--file", file]
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT,
            env={**_shell(), **self.environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"docker compose {' '.join(arguments)}: {done.stderr[-6000:]}")
        return done.stdout

    def container(self, service: str) -> str:
        """Id of a service's only container."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine knows about a service's container."""
        return cast("dict[str, Any]", json.loads(docker("inspect", self.container(service)))[0])

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes that carry the project's label."""
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("container", "--all"), ("network",), ("volume",))
        return [
            f"{kind[0]} {found}"
            for kind in kinds
            for found in docker(kind[0], "ls", *kind[1:], "--quiet", "--filter", label).split()
        ]


def _shell() -> dict[str, str]:
    return {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
