"""Messages that wait for a stream. What is queued when the stream can take more leaves in one envelope; no timer."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from kvtransfer.session.actions import EndReason
from kvtransfer.wire import take_messages

if TYPE_CHECKING:
    from kvtransfer.messages import PeerBody
    from kvtransfer.wire.envelope import AnyEnvelope

MAX_MESSAGES = 64
MAX_BYTES = 1 << 20
# A peer that does not read is cut off rather than remembered for ever; Reconcile makes up for what is lost.
MAX_QUEUED = 1 << 16


class Outbox:
    """One stream's queue, on one event loop. `ended` holds the reason once the stream is to end.

    `dst_incarnation`: whom the messages are meant for; kept here because the last ones leave after the core has
    forgotten the stream.
    """

    def __init__(self) -> None:
        self._queue: deque[PeerBody] = deque()
        self._wake = asyncio.Event()
        self._leaving = 0
        self.dst_incarnation = b""
        self.ended: tuple[EndReason, str] | None = None

    @property
    def waiting(self) -> int:
        """Messages that are queued, or taken and not known to be written: the next `ready` call says that they are."""
        return len(self._queue) + self._leaving

    def say(self, body: PeerBody, dst_incarnation: bytes) -> None:
        """Queues a message; dropped when the stream is to end."""
        if self.ended is not None:
            return
        self.dst_incarnation = dst_incarnation
        if len(self._queue) >= MAX_QUEUED:
            self._queue.clear()
            self.end(EndReason.UNAVAILABLE, f"{MAX_QUEUED} messages wait, the peer does not read")
            return
        self._queue.append(body)
        self._wake.set()

    def end(self, reason: EndReason, text: str) -> None:
        """Nothing more is queued; what is queued still goes out. The first reason counts."""
        if self.ended is None:
            self.ended = (reason, text)
        self._wake.set()

    async def ready(self) -> bool:
        """Waits for messages; False when the stream is to end and everything has gone out."""
        self._leaving = 0
        while not self._queue:
            if self.ended is not None:
                return False
            self._wake.clear()
            await self._wake.wait()
        return True

    async def gets_its_turn(self) -> None:
        """For the task that reads the stream, before it asks for the next envelope: answers leave first."""
        if self._queue:
            await asyncio.sleep(0)

    def take(self, envelope: AnyEnvelope) -> None:
        """Moves messages into an envelope: at most 64 and 1 MiB, but at least one however large."""
        envelope.dst_incarnation = self.dst_incarnation
        self._leaving = take_messages(self._queue, envelope, MAX_MESSAGES, MAX_BYTES)
