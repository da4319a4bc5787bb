"""Outgoing messages of one event-loop turn, sent as one frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from isthmus_core.framing import AsyncFrameSocket

T = TypeVar("T")


class BatchedSender(Generic[T]):
    """Collects what is sent during one turn of the loop and writes it as one frame: no timer, no delay."""

    def __init__(self, socket: AsyncFrameSocket, encode: Callable[[Sequence[T]], bytes]) -> None:
        self._socket = socket
        self._encode = encode
        self._pending: list[T] = []
        self._closed = False

    def send(self, message: T) -> None:
        """Queue a message, in order, without waiting. Raises ConnectionError when the other side is gone."""
        if self._closed:
            raise ConnectionError("the engine process is gone")
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        messages, self._pending = self._pending, []
        if self._closed:
            return
        try:
            self._socket.send(self._encode(messages))
        except ConnectionError:
            # The exit report that follows ends everything these messages were about.
            self._closed = True

    def close(self) -> None:
        """Nothing is sent any more."""
        self._closed = True
