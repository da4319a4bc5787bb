"""How an engine process is started: command line, environment, inherited files. No process yet."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from isthmus_core.config import IsthmusConfig


@dataclass(frozen=True, slots=True)
class Inherited:
    """File descriptors that a rank inherits: the configuration and its ends of the sockets."""

    config: int
    scheduler: int | None
    transfer: int | None
    steps: tuple[int, ...] = ()

    def all(self) -> list[int]:
        """Those that there are."""
        return [self.config, *(fd for fd in (self.scheduler, self.transfer) if fd is not None), *self.steps]


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Everything a start needs.

    `command` is followed by `--config` and, where they apply, `--rank`, `--scheduler-fd`, `--rank-fd`, `--lock-fd` and
    `--step-fd`.
    The child reads `config` from an inherited file: it sees exactly the settings that the hub has checked, whatever
    happened to the user's file since.
    """

    config: IsthmusConfig
    environment: Mapping[str, str]
    with_rank: bool
    start_timeout_s: float
    lock_fd: int | None = None
    command: tuple[str, ...] = (sys.executable, "-m", "isthmus_worker.engine_process")

    def write_config(self, file: IO[bytes]) -> None:
        """The settings into a file that the child inherits (JSON is YAML)."""
        file.write(json.dumps(self.config.model_dump(mode="json")).encode())
        file.seek(0)

    @property
    def ranks(self) -> int:
        """Processes of the instance."""
        return self.config.parallel.world_size

    def arguments(self, rank: int, sockets: Inherited) -> list[str]:
        """The whole command line of a rank."""
        arguments = [*self.command, "--config", f"/dev/fd/{sockets.config}"]
        if rank:
            arguments += ["--rank", str(rank)]
        for name, fd in (("scheduler", sockets.scheduler), ("rank", sockets.transfer), ("lock", self.lock_fd)):
            if fd is not None:
                arguments += [f"--{name}-fd", str(fd)]
        for fd in sockets.steps:
            arguments += ["--step-fd", str(fd)]
        return arguments
