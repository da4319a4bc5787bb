"""One child process of the fleet: started, watched, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence

from isthmus_core.errors import ConfigError, StartError
from isthmus_router.fleet.status import STABLE_S, Status, restart_pause_s

logger = logging.getLogger(__name__)

_LINE_LIMIT = 1 << 16


class Member:
    """`python -m MODULE ARGUMENT...`, tied to this process. `status`: what it said last, None while it is not up."""

    def __init__(self, name: str, module: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._module, self._arguments = module, tuple(arguments)
        self._process: asyncio.subprocess.Process | None = None
        self._deaths = 0
        self.status: Status | None = None
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def keep(self) -> None:
        """Run it until cancelled. Raises ConfigError or StartError when it can not start, or dies again and again."""
        while True:
            began = time.monotonic()
            code = await self._run()
            lived = time.monotonic() - began
            self._deaths = 1 if lived > STABLE_S else self._deaths + 1
            self._give_up_on_settings(code)
            pause = restart_pause_s(self._deaths)
            if pause is None:
                raise StartError(f"process {self.name} died {self._deaths} times in a row, last with code {code}")
            logger.warning("process %s ended with code %d; starting it again in %g s", self.name, code, pause)
            await asyncio.sleep(pause)

    def _give_up_on_settings(self, code: int) -> None:
        if self.starts > 1:
            return
        reason = f"process {self.name} could not start; its reason stands above"
        if code == ConfigError.exit_code:
            raise ConfigError(reason)
        if code == StartError.exit_code:
            raise StartError(reason)

    async def _run(self) -> int:
        """One life; the exit code."""
        read_end, write_end = os.pipe()
        command = [sys.executable, "-m", "isthmus_router.fleet.child", str(os.getpid()), str(write_end), self._module]
        try:
            # A spawn, never a fork that goes on in Python: gRPC's threads would not survive it.
            self._process = await asyncio.create_subprocess_exec(
                *command, *self._arguments, stdin=asyncio.subprocess.DEVNULL, pass_fds=(write_end,)
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        self.starts += 1
        process = self._process
        listening = asyncio.create_task(self._listen(read_end))
        try:
            return await process.wait()
        finally:
            listening.cancel()
            await asyncio.wait((listening,))
            self.status = None

    async def _listen(self, read_end: int) -> None:
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self.status = Status.parse(line)
        finally:
            transport.close()

    async def stop(self, timeout_s: float) -> int | None:
        """SIGTERM, and SIGKILL after `timeout_s` seconds. `keep` must have been cancelled. Its exit code."""
        process = self._process
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(timeout_s):
                    return await process.wait()
            except TimeoutError:
                logger.warning("process %s does not end; killed", self.name)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return await process.wait()
