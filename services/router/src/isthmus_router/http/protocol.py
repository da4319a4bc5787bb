"""uvicorn's HTTP/1.1 protocol with bounds: on connections, and on the time that a client may take to send a request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from isthmus_router.http.errors import HttpError, error_body

logger = logging.getLogger(__name__)

# After the head, the application answers a body that does not come in time; this much later the connection ends.
BODY_GRACE = 2.0
# A refused or finished client may take this long to read its last answer.
LINGER_S = 5.0


class BoundedProtocol(H11Protocol):
    """One connection. Besides `max_connections` others it is refused with 503; a head that is not complete
    `client_timeout_s` seconds after its first byte (or the connect) is answered with 408; `on_refused` hears both."""

    def __init__(
        self,
        *arguments: Any,
        max_connections: int,
        client_timeout_s: float,
        on_refused: Callable[[HttpError], None],
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._on_refused = on_refused
        self._max_connections = max_connections
        self._client_timeout_s = client_timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_for = ""
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            logger.warning("connection refused: %d are open", self._max_connections)
            limit = f"this router has {self._max_connections} open connections, its limit; try again later"
            self._last_word(HttpError(503, limit, "too_many_connections"))
        else:
            self._arm("head", self._client_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._timer is None and self.conn.their_state is h11.IDLE:
            self._arm("head", self._client_timeout_s)
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            if self._waiting_for == "head":
                self._arm("body", self._client_timeout_s * BODY_GRACE)
        elif self.conn.their_state is not h11.IDLE:
            self._disarm()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # Closing waits for the client to read what is still buffered.
        self.loop.call_later(LINGER_S, self.transport.abort)

    def _arm(self, waiting_for: str, timeout_s: float) -> None:
        self._disarm()
        self._waiting_for = waiting_for
        self._timer = self.loop.call_later(timeout_s, self._expired)

    def _disarm(self) -> None:
        self._waiting_for = ""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expired(self) -> None:
        self._timer = None
        # None before the first request, whatever the annotation says.
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if self._waiting_for == "head" and (cycle is None or cycle.response_complete):
            self._last_word(HttpError(408, f"no request within {self._client_timeout_s:g} s", "request_timeout"))
        else:
            self.transport.abort()

    def _last_word(self, error: HttpError) -> None:
        """Say why, then close."""
        self._refused = True
        self._on_refused(error)
        body = json.dumps(error_body(error)).encode()
        phrase = {408: "Request Timeout", 503: "Service Unavailable"}[error.status]
        head = f"HTTP/1.1 {error.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"retry-after: 1\r\nconnection: close\r\n\r\n" + body)
        self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)
