"""The public ports of a fleet: proven free once, then held, so that only the children of this parent get them."""

from __future__ import annotations

import socket

from isthmus_core.errors import StartError
from isthmus_core.process import prove_port_free, split_address


class ReservedPort:
    """A port on which this process's user may listen with SO_REUSEPORT, and nobody else.

    The socket is bound and never listens, so the kernel gives it no connection. Use as a context manager.
    """

    def __init__(self, address: str, field: str) -> None:
        """`address`: host:port, port 0 for a free one. Raises ConfigError, or StartError when somebody has it."""
        host, port = split_address(address, field)
        # Exclusively first: a bind with SO_REUSEPORT would silently share the port with another fleet.
        prove_port_free(host, port, field)
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise StartError(f"{field} = {address}: {error.strerror}; choose another port or stop its user") from error
        self.port = int(self._socket.getsockname()[1])
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
