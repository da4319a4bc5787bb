"""Which processes of an engine live: proof of death for processes that are not children of the hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Callable

_CREDENTIALS = struct.Struct("3i")


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the other end of a connected UNIX socket, as the kernel knows them."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class ProcessWatch:
    """Processes by id. `on_exit(pid)` is called once for each that has exited. One event loop owns it.

    A pidfd names one process for ever: an id that is given to another process later can not be mistaken for it.
    """

    def __init__(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit
        self._pidfds: dict[int, int] = {}
        self._none_left = asyncio.Event()
        self._none_left.set()

    @property
    def living(self) -> tuple[int, ...]:
        """Ids of the processes that have not exited."""
        return tuple(self._pidfds)

    def add(self, pid: int) -> None:
        """Watch a process; a second time is ignored. Raises ProcessLookupError when it is gone already."""
        if pid in self._pidfds:
            return
        pidfd = os.pidfd_open(pid)
        self._pidfds[pid] = pidfd
        self._none_left.clear()
        asyncio.get_running_loop().add_reader(pidfd, self._exited, pid)

    def kill(self) -> None:
        """SIGKILL every process that lives."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    async def wait_none(self, timeout_s: float) -> bool:
        """True when every process has exited within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Watch no longer."""
        for pid in tuple(self._pidfds):
            self._forget(pid)

    def _exited(self, pid: int) -> None:
        self._forget(pid)
        self._on_exit(pid)

    def _forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        if not self._pidfds:
            self._none_left.set()
