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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from isthmus_core.errors import StartError
from isthmus_worker.process_engine.launch import EngineLaunch, Inherited

# Of the line that goes into an exit report.
_KEPT_CHARS = 2000
_LONGEST_LINE = 1 << 16
# Block lists of a long prompt are far below: writers on both sides never wait for the other to read.
_SOCKET_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How a process ended. `code`: as subprocess has it, negative for a signal. `last_line`: of its output. `rank`: in
    an instance of several processes."""

    pid: int
    code: int
    last_line: str
    rank: int | None = None

    def __str__(self) -> str:
        how = f"left with code {self.code}"
        if self.code < 0:
            try:
                how = f"was killed by {signal.Signals(-self.code).name}"
            except ValueError:
                how = f"was killed by signal {-self.code}"
        words = f": {self.last_line}" if self.last_line else ""
        which = "" if self.rank is None else f" (rank {self.rank})"
        return f"engine process {self.pid}{which} {how}{words}"


class EngineChild:
    """A running engine process and the hub's ends of its sockets: `scheduler` of the first rank, `transfer` with a rank
    role.

    `exited` completes with the exit report once the process is gone and its output has been read.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        rank: int | None,
        scheduler: socket.socket | None,
        transfer: socket.socket | None,
    ) -> None:
        self._process, self._rank = process, rank
        self.scheduler, self.transfer = scheduler, transfer
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
    def spawn(cls, launch: EngineLaunch, rank: int = 0, steps: Sequence[socket.socket] = ()) -> EngineChild:
        """Start the process of a rank, which inherits `steps`, its way to the other ranks. Call it on the main thread:
        a child dies with the thread that made it. Raises StartError.
        """
        scheduler, theirs = socketpair() if rank == 0 else (None, None)
        transfer, transfer_theirs = socketpair() if launch.with_rank else (None, None)
        with contextlib.ExitStack() as handed_over:
            for sock in (theirs, transfer_theirs):
                if sock is not None:
                    handed_over.enter_context(sock)
            config = handed_over.enter_context(tempfile.TemporaryFile())
            launch.write_config(config)
            sockets = Inherited(
                config.fileno(), _fileno(theirs), _fileno(transfer_theirs), tuple(sock.fileno() for sock in steps)
            )
            arguments = launch.arguments(rank, sockets)
            try:
                process = subprocess.Popen(
                    arguments,
                    env=dict(launch.environment),
                    pass_fds=[*sockets.all(), *(() if launch.lock_fd is None else (launch.lock_fd,))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                for sock in (scheduler, transfer):
                    if sock is not None:
                        sock.close()
                raise StartError(f"the engine process can not be started: {arguments[0]}: {error.strerror}") from error
        return cls(process, rank if launch.ranks > 1 else None, scheduler, transfer)

    def close(self) -> None:
        """The hub's ends of the sockets."""
        for sock in (self.scheduler, self.transfer):
            if sock is not None:
                sock.close()

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
        report = ExitReport(self._process.pid, code, self._last_line, self._rank)
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


def socketpair() -> tuple[socket.socket, socket.socket]:
    """Two ends with buffers that hold a block list of a long prompt."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
    return ours, theirs


def _fileno(sock: socket.socket | None) -> int | None:
    return None if sock is None else sock.fileno()
