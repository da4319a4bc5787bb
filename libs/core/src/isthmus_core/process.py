"""Being a well-behaved process: dying with the parent, leaving without a crash, proving a port free, short pauses."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from isthmus_core.errors import ConfigError, StartError

_PR_SET_PDEATHSIG = 1
# A request makes some thousand objects, nearly all of which go with their last reference.
_GC_THRESHOLDS = (10_000, 20, 50)
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def die_with_parent(expected_parent: int | None = None) -> None:
    """Ask the kernel (Linux) to SIGKILL this process when its parent dies. Elsewhere this does nothing.

    The request is only valid from now on: when the parent (pid `expected_parent`) has died before, the process leaves
    at once.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if expected_parent is not None and os.getppid() != expected_parent:
        leave(1)


def leave(code: int) -> NoReturn:
    """Flush what can be flushed and end the process at once.

    The one way out for a process that has created a transfer agent: UCX's libraries crash when a normal interpreter
    exit unloads them.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # the reader is gone: nobody left to tell
    os._exit(code)


def settle_heap() -> None:
    """Call it when what lives as long as the process is there, libraries above all. Full garbage collections do not
    look at that any more: each of them stopped a router's event loop for 70 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def split_address(address: str, field: str) -> tuple[str, int]:
    """("host", port) of "host:port" (or "[v6]:port"). Raises ConfigError naming `field`."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{field} = {address!r}: write host:port, for example 127.0.0.1:50051")
    return host.strip("[]") or "0.0.0.0", int(port)


def prove_port_free(host: str, port: int, field: str = "listen") -> None:
    """Bind exclusively and let go. Raises StartError when somebody has the port, even by SO_REUSEPORT."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        # SO_REUSEADDR only skips TIME_WAIT on Linux; a listening socket still refuses the bind.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise StartError(
                f"{field} = {host}:{port}: {error.strerror}; choose another port or stop its user"
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, below those that the kernel hands to outgoing connections where it can be.

    A client that dials a port of that range before its server listens can meet itself there: the kernel gives it the
    same port as its own end, the connection stands, and the server finds its port taken.
    """
    lowest = int(_PORT_RANGE.read_text().split()[0]) if _PORT_RANGE.exists() else 32768
    for port in random.SystemRandom().sample(range(10240, lowest), 64) if lowest > 10304 else ():
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock, suppress(OSError):
            sock.bind((host, port))
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
