"""The child's side of the status pipe."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Protocol

from isthmus_router.fleet.status import Status

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.2


class Watched(Protocol):
    """What a status is made of."""

    @property
    def running(self) -> int: ...

    def missing(self) -> list[str]: ...


class StatusReporter:
    """Writes the status to `fd` whenever it has changed. Use as a context manager, on the event loop."""

    def __init__(self, fd: int, watched: Watched, metrics_port: int | None) -> None:
        self._fd, self._watched, self._metrics_port = fd, watched, metrics_port
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> StatusReporter:
        self._task = asyncio.create_task(self._report(), name="status of this process")
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        os.close(self._fd)

    async def _report(self) -> None:
        said: Status | None = None
        while True:
            status = Status(tuple(self._watched.missing()), self._watched.running, self._metrics_port)
            if status != said:
                said = status
                try:
                    # A line is far shorter than what a pipe takes in one piece, and the parent reads all the time.
                    os.write(self._fd, status.line())
                except BrokenPipeError:
                    return  # the parent is gone, and this process with it
            await asyncio.sleep(_INTERVAL_S)
