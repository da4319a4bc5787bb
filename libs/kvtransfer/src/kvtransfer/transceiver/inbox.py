"""Messages of the hub that wait for the scheduler's thread: queued by any thread, taken at step boundaries."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey


class _Keyed(Protocol):
    @property
    def key(self) -> RequestKey: ...


M = TypeVar("M", bound=_Keyed)


class Inbox(Generic[M]):
    """One kind of message, in order. `clock` in seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: deque[M] = deque()
        self._arrived = threading.Condition()

    def put(self, message: M) -> None:
        """From any thread."""
        with self._arrived:
            self._queue.append(message)
            self._arrived.notify_all()

    def has(self, key: RequestKey) -> bool:
        """True when a message about the key waits."""
        with self._arrived:
            return any(message.key == key for message in self._queue)

    def take(self, at_least: int = 0, timeout_s: float = 0.0) -> list[M]:
        """All that wait. First waits up to `timeout_s` seconds for messages about `at_least` keys."""
        until = self._clock() + timeout_s if at_least > 0 and timeout_s > 0 else None
        with self._arrived:
            while until is not None and len({message.key for message in self._queue}) < at_least:
                left = until - self._clock()
                if left <= 0:
                    break
                self._arrived.wait(left)
            messages = list(self._queue)
            self._queue.clear()
        return messages

    def take_first(self, key: RequestKey, timeout_s: float) -> M | None:
        """The first message about the key; None when none comes within `timeout_s` seconds. Others stay."""
        until = self._clock() + timeout_s
        with self._arrived:
            while (message := next((one for one in self._queue if one.key == key), None)) is None:
                left = until - self._clock()
                if left <= 0:
                    return None
                self._arrived.wait(left)
            self._queue.remove(message)
        return message
