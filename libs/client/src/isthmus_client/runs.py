"""Folders of local clusters: settings, state, logs. Each names the supervisor that owns it, so that `down` finds it.

<state home>/isthmus/runs/<date>-<pid>/{run.json, config/, state/, logs/}
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil

from isthmus_core.errors import StartError

KEEP_RUNS = 5


def runs_home() -> Path:
    """Where run folders are: $XDG_STATE_HOME/isthmus/runs or ~/.local/state/isthmus/runs."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "isthmus" / "runs"


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder."""

    folder: Path
    logs: Path

    @property
    def config(self) -> Path:
        """One YAML file per process."""
        return self.folder / "config"

    @property
    def state(self) -> Path:
        """Instance locks of the workers."""
        return self.folder / "state"


def _started_at(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def _owner(folder: Path) -> int | None:
    """Pid of the supervisor that owns the folder, None when it is gone (a reused pid is somebody else)."""
    try:
        data = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(data, dict):
        return None
    record = cast("dict[str, Any]", data)
    pid, started = record.get("pid"), record.get("started")
    if not isinstance(pid, int) or not isinstance(started, float):
        return None
    return pid if _started_at(pid) == started else None


def create_run(log_dir: Path | None, home: Path | None = None) -> Run:
    """A fresh run folder owned by this process; folders of ended runs beyond the newest few are removed.

    Raises StartError when a folder can not be made.
    """
    home = home or runs_home()
    folder = home / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    run = Run(folder, log_dir or folder / "logs")
    try:
        for path in (folder, run.config, run.state, run.logs):
            path.mkdir(parents=True, exist_ok=True)
        record = {"pid": os.getpid(), "started": _started_at(os.getpid())}
        (folder / "run.json").write_text(json.dumps(record))
    except OSError as error:
        raise StartError(f"can not make the run folder {error.filename}: {error.strerror}") from error
    _prune(home, keep=KEEP_RUNS)
    return run


def _prune(home: Path, keep: int) -> None:
    ended = sorted(path for path in home.iterdir() if path.is_dir() and _owner(path) is None)
    for path in ended[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _alive(process: psutil.Process) -> bool:
    """False also for a process that has ended and that its own parent has not looked at yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop_runs(timeout_s: float, home: Path | None = None) -> list[int]:
    """SIGTERM every supervisor that lives and wait for its end. Returns their pids.

    Raises StartError when one has not ended within `timeout_s` seconds.
    """
    home = home or runs_home()
    folders = list(home.iterdir()) if home.is_dir() else []
    owners = {pid for pid in map(_owner, folders) if pid is not None and pid != os.getpid()}
    processes = [psutil.Process(pid) for pid in owners if psutil.pid_exists(pid)]
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while (alive := [process for process in processes if _alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive:
        raise StartError(f"still running after {timeout_s:g} s: pid {', '.join(str(process.pid) for process in alive)}")
    return sorted(owners)
