"""uvicorn inside the service's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Generator
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from isthmus_core.errors import StartError
from isthmus_core.process import split_address
from isthmus_router.http.errors import HttpError
from isthmus_router.http.protocol import BoundedProtocol

_FIELD = "router.http_listen"


def bind(address: str, field: str = _FIELD, *, shared: bool = False) -> socket.socket:
    """A socket bound to host:port, not listening yet; exclusively, or `shared` with the other processes of a fleet.
    Raises ConfigError or StartError."""
    host, port = split_address(address, field)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # On Linux this only skips TIME_WAIT: the bind still fails while somebody has the port.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartError(f"{field} = {address}: {error.strerror}; choose another port or stop its user") from error
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # The service handles signals; uvicorn must not replace its handlers.
        yield


class HttpServer:
    """An HTTP server on a bound socket. `drain_s`: running requests may take this long after `stop`; the other options
    are those of `BoundedProtocol`."""

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        drain_s: float,
        *,
        max_connections: int,
        client_timeout_s: float,
        on_refused: Callable[[HttpError], None] = lambda _: None,
    ) -> None:
        protocol = partial(
            BoundedProtocol,
            max_connections=max_connections,
            client_timeout_s=client_timeout_s,
            on_refused=on_refused,
        )
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, math.ceil(drain_s)),  # whole seconds
        )
        self._server = _Server(config)
        self._sock = sock
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._sock.getsockname()[1])

    def start(self) -> None:
        """Serve, in a task of the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._sock]))

    async def failed(self) -> None:
        """Returns when the server has ended; raises what ended it. Cancelling this does not end the server."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stop accepting, let running requests finish, end the rest after the drain time."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
