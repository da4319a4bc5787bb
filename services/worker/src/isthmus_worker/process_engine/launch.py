"""How an engine process is started: command line, environment, inherited files. No process yet."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from isthmus_core.config import IsthmusConfig


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Everything a start needs.

    `command` is followed by `--config`, `--scheduler-fd` and, where they apply, `--rank-fd` and `--lock-fd`.
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

    def arguments(self, config_fd: int, scheduler_fd: int, rank_fd: int | None) -> list[str]:
        """The whole command line."""
        arguments = [*self.command, "--config", f"/dev/fd/{config_fd}", "--scheduler-fd", str(scheduler_fd)]
        if rank_fd is not None:
            arguments += ["--rank-fd", str(rank_fd)]
        if self.lock_fd is not None:
            arguments += ["--lock-fd", str(self.lock_fd)]
        return arguments
