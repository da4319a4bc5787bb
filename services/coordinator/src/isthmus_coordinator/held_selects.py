"""Requests that a coordinator which has just started can not place yet: their instances may be on their way back.

They wait here instead of being refused, are tried again whenever the cluster changes, and get their answer at the
latest when the coordinator has settled. A router that gives one up says Finish, as for a placement. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from isthmus.v1 import coordinator_service_pb2

from isthmus_core.errors import DuplicateRequest, NoCapacity
from isthmus_core.keys import RequestKey

# More than this wait for nobody: the rest is refused as always.
MOST_HELD = 16_384

Select = coordinator_service_pb2.Select
_Key = tuple[int, int, int]


class HeldSelects:
    """Selects without an answer, oldest first. `router`: the token of a router's stream."""

    def __init__(self) -> None:
        self._held: dict[_Key, tuple[Select, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, router: int, select: Select, since_ns: int) -> None:
        """Keep one for later that came at `since_ns` (Unix time). Raises DuplicateRequest, or NoCapacity when too many
        wait."""
        key = (router, select.key.request_id, select.key.attempt)
        if key in self._held:
            raise DuplicateRequest(select.key.request_id)
        if len(self._held) >= MOST_HELD:
            raise NoCapacity(f"the coordinator has just started: {MOST_HELD} requests wait for instances")
        self._held[key] = (select, since_ns)

    def retry(self, answer: Callable[[int, Select, int], bool]) -> None:
        """Try them again: `answer(router, select, since_ns)` is False for one that must wait on. Of those that ask for
        the same only the first is asked again after it could not be placed."""
        held, self._held = self._held, {}
        hopeless: set[tuple[object, ...]] = set()
        for key, (select, since_ns) in held.items():
            kind = (select.model, *select.kinds, *select.excluded_incarnations)
            if kind in hopeless or not answer(key[0], select, since_ns):
                hopeless.add(kind)
                self._held[key] = (select, since_ns)

    def withdraw(self, router: int, key: RequestKey) -> bool:
        """Take out one that its router gives up; False when it is not here."""
        return self._held.pop((router, key.request_id, key.attempt), None) is not None

    def drop_router(self, router: int) -> None:
        """The router's stream is over; its next one repeats what still waits."""
        self._held = {key: held for key, held in self._held.items() if key[0] != router}
