"""One child process: started in its own process group, its output in a rotating log, its last words kept."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus_client.logfile import RotatingLog

_TAIL_BYTES = 16 << 10
# A log record begins with a time of day (or a brace); the reason of a failed start is printed without one.
_LOG_RECORD = re.compile(r"^(\d\d:\d\d:\d\d\.\d{3} |\{)")


def last_words(output: bytes) -> str:
    """The reason a process gave before it ended: its last line that is not a log record, or its last line."""
    lines = [line.rstrip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    plain = [line for line in lines if not _LOG_RECORD.match(line)]
    return (plain or lines or ["no output"])[-1].strip()


class ChildProcess:
    """`python -m MODULE ARGUMENT...` as a child that can not outlive this process.

    Start it from a thread that lives as long as the child should (the event loop's): the kernel ties the child to the
    thread that made it.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]):
        self.name = name
        self.log_path = log
        self._command = [sys.executable, "-m", "isthmus_client.child", str(os.getpid()), module, *arguments]
        self._environment = dict(environment)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail = bytearray()

    async def start(self) -> None:
        """Spawn it. Raises OSError when the system can not."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to handle
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
        )
        self._reader = asyncio.create_task(self._copy_output(), name=f"log of {self.name}")

    @property
    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} has not been started")
        return self._process

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group."""
        return self._started.pid

    @property
    def running(self) -> bool:
        """True until its exit has been seen."""
        return self._process is not None and self._process.returncode is None

    @property
    def reason(self) -> str:
        """What it said last."""
        return last_words(bytes(self._tail))

    async def wait(self) -> int:
        """Its exit code (negative: the signal that killed it), once its output has been read to the end."""
        code = await self._started.wait()
        if self._reader is not None:
            # A grandchild that keeps the pipe open must not hold this up: it is killed with its own parent.
            await asyncio.wait([self._reader], timeout=2.0)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself; nothing when it is gone."""
        if self.running:
            self._started.send_signal(number)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children; nothing when they are gone."""
        if self.running:
            os.killpg(self.pid, number)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, `grace_s` seconds to leave, then SIGKILL to the whole group. Returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.wait(), grace_s)
        except TimeoutError:
            self.signal_group(signal.SIGKILL)
            return await self.wait()

    async def _copy_output(self) -> None:
        stdout = self._started.stdout
        if stdout is None:
            raise RuntimeError(f"{self.name} was started without a pipe")
        log = RotatingLog(self.log_path)
        try:
            while data := await stdout.read(65_536):
                log.write(data)
                self._tail += data
                del self._tail[:-_TAIL_BYTES]
        finally:
            log.close()
