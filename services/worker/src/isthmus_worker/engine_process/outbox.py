"""The way out: everything one step says, as one frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_worker.engine_process.frames import EngineMessage, events_to_bytes

if TYPE_CHECKING:
    from isthmus_core.framing import FrameSocket
    from kvtransfer.ports import SchedulerToHub


class Outbox:
    """Collects messages in order; `flush` sends them. Also the transceiver's `SchedulerPort`, so that an offer and the
    event that depends on it keep their order. One thread uses it."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._pending: list[EngineMessage] = []

    def send(self, message: SchedulerToHub) -> None:
        """A message of the transceiver."""
        self._pending.append(message)

    def emit(self, message: EngineMessage) -> None:
        """Any other message."""
        self._pending.append(message)

    def flush(self) -> None:
        """Sends what was collected, if anything. Raises ConnectionError when the hub is gone."""
        if self._pending:
            self._frames.send(events_to_bytes(self._pending))
            self._pending.clear()
