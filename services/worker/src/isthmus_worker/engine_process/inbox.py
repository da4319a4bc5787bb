"""The way in: a thread reads frames from the hub, the loop takes what has arrived."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_core.framing import FrameError
from isthmus_worker.engine_process.frames import commands_from_bytes

if TYPE_CHECKING:
    from isthmus_core.framing import FrameSocket
    from isthmus_worker.wire.engine_frames import EngineCommand


@dataclass(frozen=True, slots=True)
class HubGone:
    """The hub has closed its end, or died. Nothing follows."""


class Inbox:
    """Commands in order. `start` starts the reading thread, which ends with the stream."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._queue: queue.SimpleQueue[list[EngineCommand] | HubGone | FrameError] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="engine-inbox", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()

    def take(self, wait_s: float | None = 0.0) -> list[EngineCommand | HubGone]:
        """Everything that has arrived. Waits up to `wait_s` seconds (None: for ever) for the first command.

        Raises FrameError when the hub sent something that can not be read.
        """
        taken: list[EngineCommand | HubGone] = []
        try:
            item = self._queue.get_nowait() if wait_s == 0.0 else self._queue.get(timeout=wait_s)
            while True:
                if isinstance(item, FrameError):
                    raise item
                if isinstance(item, HubGone):
                    taken.append(item)
                else:
                    taken.extend(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return taken

    def _read(self) -> None:
        try:
            while (frame := self._frames.recv()) is not None:
                self._queue.put(commands_from_bytes(frame))
        except FrameError as error:
            self._queue.put(error)
        self._queue.put(HubGone())
