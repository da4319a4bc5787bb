"""The engine's process: spawn, output, exit report. Knows nothing of what is said over its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import IO

from isthmus_core.errors import StartError
from isthmus_worker.process_engine.launch import EngineLaunch

# Of the line that goes into an exit report.
_KEPT_CHARS = 2000
_LONGEST_LINE = 1 << 16
# Block lists of a long prompt are far below; writers on both sides never wait for the other to read.
_SOCKET_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a process ended. `code`: as subprocess has it, negative for a signal. `last_line`: of its output."""

    pid: int
    code: int
    last_line: str

    def __str__(self) -> str:
        how = f"left with code {self.code}"
        if self.code < 0:
            try:
                how = f"was killed by {signal.Signals(-self.code).name}"
            except ValueError:
                how = f"was killed by signal {-self.code}"
        words = f": {self.last_line}" if self.last_line else ""
        return f"engine process {self.pid} {how}{words}"


class EngineChild:
    """A running engine process and the hub's ends of its sockets (`rank` is None without a rank role).

    `exited` completes with the exit report once the process is gone and its output has been read.
    """

    def __init__(self, process: subprocess.Popen[bytes], scheduler: socket.socket, rank: socket.socket | None) -> None:
        self._process = process
        self.scheduler = scheduler
        self.rank = rank
        self.exited: asyncio.Future[ExitReport] = asyncio.get_running_loop().create_future()
        self._last_line = ""
        self._watcher = threading.Thread(
            target=self._watch, args=(asyncio.get_running_loop(), process.stdout), name="engine-watch", daemon=True
        )
        self._watcher.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @classmethod
    def spawn(cls, launch: EngineLaunch) -> EngineChild:
        """Start the process. Call it on the main thread: a child dies with the thread that made it.

        Raises StartError.
        """
        ours, theirs = _socketpair()
        rank_ours, rank_theirs = _socketpair() if launch.with_rank else (None, None)
        with contextlib.ExitStack() as handed_over:
            handed_over.enter_context(theirs)
            config = handed_over.enter_context(tempfile.TemporaryFile())
            launch.write_config(config)
            inherited = [theirs.fileno(), config.fileno()]
            if rank_theirs is not None:
                handed_over.enter_context(rank_theirs)
                inherited.append(rank_theirs.fileno())
            if launch.lock_fd is not None:
                inherited.append(launch.lock_fd)
            rank_fd = None if rank_theirs is None else rank_theirs.fileno()
            arguments = launch.arguments(config.fileno(), theirs.fileno(), rank_fd)
            try:
                process = subprocess.Popen(
                    arguments,
                    env=dict(launch.environment),
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                for sock in (ours, rank_ours):
                    if sock is not None:
                        sock.close()
                raise StartError(f"the engine process can not be started: {arguments[0]}: {error.strerror}") from error
        return cls(process, ours, rank_ours)

    def signal(self, number: int) -> None:
        """Send a signal; a process that is gone already gets none."""
        self._process.send_signal(number)

    async def wait(self, timeout_s: float) -> ExitReport | None:
        """The exit report; None when the process still runs after `timeout_s` seconds."""
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        return self.exited.result() if done else None

    def _watch(self, loop: asyncio.AbstractEventLoop, output: IO[bytes] | None) -> None:
        """On its own thread: pass the output on, then reap. (Portable, and free of the loop's child handling.)"""
        reader = threading.Thread(target=self._pass_on, args=(output,), name="engine-output", daemon=True)
        reader.start()
        code = self._process.wait()
        # A grandchild may keep the pipe open; the process itself has said everything.
        reader.join(1.0)
        report = ExitReport(self._process.pid, code, self._last_line)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for the report
            loop.call_soon_threadsafe(self._report, report)

    def _report(self, report: ExitReport) -> None:
        if not self.exited.done():
            self.exited.set_result(report)

    def _pass_on(self, output: IO[bytes] | None) -> None:
        if output is None:
            return
        forward = True
        with output:
            while line := output.readline(_LONGEST_LINE):
                text = line.decode(errors="replace")
                if text.strip():
                    self._last_line = text.strip()[:_KEPT_CHARS]
                if forward:
                    try:
                        sys.stderr.write(text)
                        sys.stderr.flush()
                    except (OSError, ValueError):
                        forward = False  # our own reader is gone; the child must still not block on a full pipe


def _socketpair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return ours, theirs
