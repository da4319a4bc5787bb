"""The engine's end: how its scheduler and its ranks reach the hub of their host."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_core.framing import FrameError, FrameSocket
from kvtransfer.errors import KVTransferError, WireError
from kvtransfer.wire.local import (
    local_hello_to_bytes,
    local_input_from_bytes,
    local_output_to_bytes,
    local_welcome_from_bytes,
)

if TYPE_CHECKING:
    from kvtransfer.local.messages import LocalHello, LocalWelcome
    from kvtransfer.ports import HubToScheduler, SchedulerToHub

log = logging.getLogger(__name__)

# Block lists of a long prompt are far below; writers on both sides never wait for the other to read.
SOCKET_BUFFER = 1 << 20
# Names the hub's socket to the processes of an engine that is started with a hub.
HUB_VARIABLE = "ISTHMUS_KV_HUB"


class HubUnreachable(KVTransferError):
    """The hub does not answer, or does not want this process. Says why and what to do."""


@dataclass(slots=True)
class Connection:
    """A process of the engine and its hub. `lock_fd` must stay open as long as the process lives: it proves that the
    process may still write. None when the hub has no lock."""

    sock: socket.socket
    welcome: LocalWelcome
    lock_fd: int | None


def connect(path: str, hello: LocalHello, timeout_s: float = 30.0) -> Connection:
    """Introduces this process. Raises HubUnreachable."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    lock_fd: int | None = None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        sock.settimeout(timeout_s)
        sock.connect(path)
        data, fds, _, _ = socket.recv_fds(sock, 1, 1)
        lock_fd = fds[0] if fds else None
        if not data:
            raise HubUnreachable(f"the hub at {path} closed the connection")
        if lock_fd is not None:
            os.set_inheritable(lock_fd, False)
        frames = FrameSocket(sock)
        frames.send(local_hello_to_bytes(hello))
        answer = frames.recv()
        welcome = "it closed the connection" if answer is None else local_welcome_from_bytes(answer)
        if isinstance(welcome, str):
            raise HubUnreachable(f"the hub at {path} does not want this process: {welcome}")
    except (OSError, FrameError, WireError) as error:
        _drop(sock, lock_fd)
        raise HubUnreachable(f"hub at {path}: {error}; is it running, and of the same release?") from error
    except BaseException:
        _drop(sock, lock_fd)
        raise
    return Connection(sock, welcome, lock_fd)


def _drop(sock: socket.socket, lock_fd: int | None) -> None:
    sock.close()
    if lock_fd is not None:
        with contextlib.suppress(OSError):
            os.close(lock_fd)


class SchedulerLink:
    """The scheduler role's port to the hub. `deliver` gets what the hub says, on a thread of the link, in order;
    `on_gone(reason)` is called there once, as the last thing, when the hub is gone."""

    def __init__(
        self, sock: socket.socket, deliver: Callable[[HubToScheduler], None], on_gone: Callable[[str], None]
    ) -> None:
        self._frames = FrameSocket(sock)
        self._deliver, self._on_gone = deliver, on_gone
        self._closing = False
        self._reader = threading.Thread(target=self._read, name="kv-scheduler-link", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._reader.start()

    def send(self, message: SchedulerToHub) -> None:
        """See `kvtransfer.ports.SchedulerPort`."""
        self._frames.send(local_output_to_bytes((message,)))

    def close(self) -> None:
        """Leave. Idempotent; `on_gone` is not called for it."""
        self._closing = True
        self._frames.close()

    def _read(self) -> None:
        reason = "it closed the connection"
        try:
            while (frame := self._frames.recv()) is not None:
                for message in local_input_from_bytes(frame):
                    self._deliver(message)
        except (FrameError, WireError) as error:
            reason = str(error)
        if not self._closing:
            self._on_gone(reason)
