"""One living incarnation of an instance on a host, and proof that the earlier ones are dead.

    <state_dir>/<instance_id>.lock   held by flock as long as the hub or any process it has spawned lives
    <state_dir>/<instance_id>.json   who holds it, and the incarnations that held it before

The lock belongs to an open file description that the hub's children inherit: it can only be taken when every process
of every earlier holder has exited, which is the proof that none of them writes into a peer's memory any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from isthmus_core.errors import ConfigError, StartError

logger = logging.getLogger(__name__)

# A peer asks about an incarnation within minutes of its end; an instance that restarts in a loop stays bounded.
MAX_EXITED = 64
# A killed hub's processes die with it, but a large one takes a moment to give its memory back.
WAIT_S = 10.0
_POLL_S = 0.05
_INCARNATION_BYTES = 16


@dataclass(frozen=True, slots=True)
class _History:
    incarnation: bytes
    pid: int
    since: float
    exited: tuple[bytes, ...]


class InstanceLock:
    """The lock of a living incarnation. `fd` must be inherited by every process that can write for the instance.

    `exited`: earlier incarnations on this host, newest first, of which every process is proven to have exited.
    """

    def __init__(self, fd: int, exited: tuple[bytes, ...]) -> None:
        self.fd = fd
        self.exited = exited

    def release(self) -> None:
        """Let this process's hold go; children that inherited it keep theirs. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


async def acquire(state_dir: Path, instance_id: str, incarnation: bytes, wait_s: float = WAIT_S) -> InstanceLock:
    """Take the lock for `incarnation`, waiting up to `wait_s` seconds for a predecessor's processes to be gone.

    Raises StartError naming the holder when it stays taken, ConfigError when the folder can not be used.
    """
    history_path = state_dir / f"{instance_id}.json"
    fd = _open(state_dir, instance_id)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                raise StartError(_taken(instance_id, _read_history(history_path), wait_s))
            await asyncio.sleep(_POLL_S)
        before = _read_history(history_path)
        exited = () if before is None else (before.incarnation, *before.exited)[:MAX_EXITED]
        _write_history(history_path, _History(incarnation, os.getpid(), time.time(), exited))
    except BaseException:
        os.close(fd)
        raise
    return InstanceLock(fd, exited)


def _open(state_dir: Path, instance_id: str) -> int:
    path = state_dir / f"{instance_id}.lock"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"worker.state_dir = {state_dir}: {path.name}: {error.strerror}") from error


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _taken(instance_id: str, holder: _History | None, wait_s: float) -> str:
    who = "another process"
    if holder is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        who = f"process {holder.pid} (since {since}, incarnation {holder.incarnation.hex()}) or one of its children"
    return (
        f"worker.instance_id = {instance_id}: still held by {who} after {wait_s:g} s; "
        "stop it, or give this worker another instance_id"
    )


def _read_history(path: Path) -> _History | None:
    """None when there is none. One that can not be read proves nothing, so it is as good as none: pages that earlier
    incarnations left in doubt at their peers then stay in doubt."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"worker.state_dir = {path.parent}: {path.name}: {error.strerror}") from error
    try:
        data = cast("dict[str, Any]", json.loads(text))
        exited = tuple(bytes.fromhex(one) for one in data["exited"])
        history = _History(bytes.fromhex(data["incarnation"]), int(data["pid"]), float(data["since"]), exited)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged (%r): nothing is known of earlier incarnations", path, error)
        return None
    if any(len(one) != _INCARNATION_BYTES for one in (history.incarnation, *history.exited)):
        logger.warning("%s names incarnations of a wrong length: nothing is known of earlier ones", path)
        return None
    return history


def _write_history(path: Path, history: _History) -> None:
    data = {
        "incarnation": history.incarnation.hex(),
        "pid": history.pid,
        "since": history.since,
        "exited": [one.hex() for one in history.exited],
    }
    part = path.with_suffix(".json.part")
    try:
        # Whole or not at all: a reader after a crash sees the old or the new list.
        part.write_text(json.dumps(data))
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise ConfigError(f"worker.state_dir = {path.parent}: {path.name}: {error.strerror}") from error
