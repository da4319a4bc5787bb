"""Open placements: what each router has been given and has not finished, and what that makes per instance.

Load is never counted up and down on a member; it is kept per start of an instance. So it is right again when a member
whose stream broke comes back, and gone with a member that does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus_coordinator.membership import Start
from isthmus_core.errors import DuplicateRequest, InternalError
from isthmus_core.keys import RequestKey


@dataclass(frozen=True, slots=True)
class _Open:
    router: int
    key: RequestKey
    starts: tuple[Start, ...]


class OpenPlacements:
    """Open placements by request id. `router` is the token of a router's stream."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._of_router: dict[int, set[int]] = {}
        self._on: Counter[Start] = Counter()

    def refuse_live(self, request_id: int) -> None:
        """Raise DuplicateRequest when a placement of that id, in whatever attempt, is open."""
        if request_id in self._open:
            raise DuplicateRequest(request_id)

    def reserve(self, router: int, key: RequestKey, starts: tuple[Start, ...]) -> None:
        """Count a placement. Raises DuplicateRequest."""
        self.refuse_live(key.request_id)
        self._open[key.request_id] = _Open(router, key, starts)
        self._of_router.setdefault(router, set()).add(key.request_id)
        self._on.update(starts)

    def adopt(self, router: int, placements: Iterable[tuple[RequestKey, tuple[Start, ...]]]) -> None:
        """Count what a router names after a reconnect. What another stream is still counted for is taken over: that
        stream is the broken one of the same router, or its router has lost the request."""
        for key, starts in placements:
            if (old := self._open.get(key.request_id)) is not None:
                self._remove(old)
            self.reserve(router, key, starts)

    def finish(self, router: int, key: RequestKey) -> bool:
        """Release. False when the router holds no such placement."""
        held = self._open.get(key.request_id)
        if held is None or held.router != router or held.key != key:
            return False
        self._remove(held)
        return True

    def drop_router(self, router: int) -> int:
        """Release everything of a router. Returns how many there were."""
        ids = list(self._of_router.get(router, ()))
        for request_id in ids:
            self._remove(self._open[request_id])
        return len(ids)

    def on(self, start: Start) -> int:
        """Open placements on an instance."""
        return self._on.get(start, 0)

    def __len__(self) -> int:
        return len(self._open)

    def _remove(self, held: _Open) -> None:
        del self._open[held.key.request_id]
        mine = self._of_router[held.router]
        mine.discard(held.key.request_id)
        if not mine:
            del self._of_router[held.router]
        for start in held.starts:
            self._on[start] -= 1
            if not self._on[start]:
                del self._on[start]
        if not self._open:
            self.check()

    def check(self) -> None:
        """Compare the counts with the placements they stem from. Raises InternalError on any difference.

        Runs by itself whenever the last placement ends, when it costs nothing."""
        on = Counter(start for held in self._open.values() for start in held.starts)
        of_router: dict[int, set[int]] = {}
        for request_id, held in self._open.items():
            of_router.setdefault(held.router, set()).add(request_id)
        if on != self._on or of_router != self._of_router:
            raise InternalError(
                f"load has drifted: {len(self._open)} open placements, counted {dict(self._on)} for {dict(on)}, "
                f"routers {sorted(self._of_router)} for {sorted(of_router)}"
            )
