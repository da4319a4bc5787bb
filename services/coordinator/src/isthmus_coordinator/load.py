"""Open placements: what each router has been given and has not finished, and what that makes per instance.

Load is never counted up and down on a member; it is kept per start of an instance. So it is right again when a member
whose stream broke comes back, and gone with a member that does not. Of the members there are arrays besides, which the
policies read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from isthmus_coordinator.costs import Loads
from isthmus_coordinator.membership import Member, Start
from isthmus_core.errors import DuplicateRequest, InternalError
from isthmus_core.keys import RequestKey

_FIRST = 64
_HALF_LIFE = 32


@dataclass(frozen=True, slots=True)
class LegLoad:
    """What one leg puts on an instance: prompt tokens to compute, prompt and output tokens that it may come to hold."""

    start: Start
    prefill: int
    tokens: int


@dataclass(slots=True)
class _On:
    """What is open on one start."""

    requests: int = 0
    prefill: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Open:
    router: int
    key: RequestKey
    legs: tuple[LegLoad, ...]


class OpenPlacements:
    """Open placements by request id. `router` is the token of a router's stream."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._of_router: dict[int, set[int]] = {}
        self._on: dict[Start, _On] = {}
        self._numbers: dict[Start, int] = {}
        self._finished: dict[int, int] = {}
        self.loads = Loads(np.zeros(_FIRST), np.zeros(_FIRST), np.zeros(_FIRST), np.zeros(_FIRST))

    def joined(self, member: Member) -> None:
        """A member has come: what is open on its start counts for its number."""
        size = len(self.loads.prefill)
        if member.number >= size:
            arrays = (self.loads.prefill, self.loads.tokens, self.loads.used, self.loads.recent)
            self.loads = Loads(*(np.pad(array, (0, size)) for array in arrays))
        # Not less than others have: a newcomer is not to get everything for a while.
        self.loads.recent[member.number] = self.loads.recent.max()
        self._numbers[member.instance.start] = member.number
        self.loads.used[member.number] = 0
        self._show(member.instance.start)

    def left(self, member: Member) -> None:
        """A member is gone."""
        if self._numbers.get(member.instance.start) == member.number:
            del self._numbers[member.instance.start]
            self._finished.pop(member.number, None)
            for array in (self.loads.prefill, self.loads.tokens, self.loads.used, self.loads.recent):
                array[member.number] = 0

    def reported(self, member: Member) -> None:
        """The load of a member has changed. Blocks that an instance keeps for its own answers are as good as used."""
        load, blocks = member.load, member.load.used_blocks
        if load.receive_credits:
            blocks = max(blocks, load.total_blocks - load.receive_credits)
        self.loads.used[member.number] = blocks * member.instance.tokens_per_block

    def refuse_live(self, request_id: int) -> None:
        """Raise DuplicateRequest when a placement of that id, in whatever attempt, is open."""
        if request_id in self._open:
            raise DuplicateRequest(request_id)

    def reserve(self, router: int, key: RequestKey, legs: tuple[LegLoad, ...]) -> None:
        """Count a placement. Raises DuplicateRequest."""
        self.refuse_live(key.request_id)
        self._open[key.request_id] = _Open(router, key, legs)
        self._of_router.setdefault(router, set()).add(key.request_id)
        for leg in legs:
            self._count(leg, 1)
        self._remember(legs)

    def _remember(self, legs: tuple[LegLoad, ...]) -> None:
        """Add to `recent`, where a placement is worth half after 32 times as many placements as there are members."""
        recent, number = self.loads.recent, self._numbers.get(legs[0].start)
        recent *= 0.5 ** (1 / (_HALF_LIFE * max(1, len(self._numbers))))
        if number is not None:
            recent[number] += legs[0].prefill

    def adopt(self, router: int, placements: Iterable[tuple[RequestKey, tuple[LegLoad, ...]]]) -> None:
        """Count what a router names after a reconnect. What another stream is still counted for is taken over: that
        stream is the broken one of the same router, or its router has lost the request."""
        for key, legs in placements:
            if (old := self._open.get(key.request_id)) is not None:
                self._remove(old)
            self.reserve(router, key, legs)

    def prefilled(self, router: int, key: RequestKey) -> bool:
        """The prompt has been computed. False when the router holds no such placement."""
        held = self._held(router, key)
        if held is None:
            return False
        for leg in held.legs:
            self._count(leg, -1)
        legs = tuple(replace(leg, prefill=0) for leg in held.legs)
        self._open[key.request_id] = replace(held, legs=legs)
        for leg in legs:
            self._count(leg, 1)
        return True

    def finish(self, router: int, key: RequestKey) -> bool:
        """Release. False when the router holds no such placement."""
        held = self._held(router, key)
        if held is None:
            return False
        self._remove(held)
        for leg in held.legs:
            if (number := self._numbers.get(leg.start)) is not None:
                self._finished[number] = self._finished.get(number, 0) + 1
        return True

    def finished(self, start: Start) -> int:
        """Placements on a member that have been finished since it came."""
        number = self._numbers.get(start)
        return 0 if number is None else self._finished.get(number, 0)

    def drop_router(self, router: int) -> int:
        """Release everything of a router. Returns how many there were."""
        ids = list(self._of_router.get(router, ()))
        for request_id in ids:
            self._remove(self._open[request_id])
        return len(ids)

    def on(self, start: Start) -> tuple[int, int]:
        """Open placements on an instance, and their tokens."""
        found = self._on.get(start)
        return (0, 0) if found is None else (found.requests, found.tokens)

    def __len__(self) -> int:
        return len(self._open)

    def _held(self, router: int, key: RequestKey) -> _Open | None:
        held = self._open.get(key.request_id)
        return held if held is not None and held.router == router and held.key == key else None

    def _count(self, leg: LegLoad, sign: int) -> None:
        start = leg.start
        on = self._on.get(start)
        if on is None:
            on = self._on[start] = _On()
        on.requests += sign
        on.prefill += sign * leg.prefill
        on.tokens += sign * leg.tokens
        if not on.requests:
            del self._on[start]
        if (number := self._numbers.get(start)) is not None:
            self.loads.prefill[number], self.loads.tokens[number] = on.prefill, on.tokens

    def _show(self, start: Start) -> None:
        number = self._numbers.get(start)
        if number is not None:
            on = self._on.get(start)
            self.loads.prefill[number], self.loads.tokens[number] = (0, 0) if on is None else (on.prefill, on.tokens)

    def _remove(self, held: _Open) -> None:
        del self._open[held.key.request_id]
        mine = self._of_router[held.router]
        mine.discard(held.key.request_id)
        if not mine:
            del self._of_router[held.router]
        for leg in held.legs:
            self._count(leg, -1)
        # Costs little when nothing is open.
        if not self._open and (self._on or self._of_router or self.loads.prefill.any() or self.loads.tokens.any()):
            raise InternalError(f"load has drifted: no placement is open, counted {self._on} of {self._of_router}")

    def check(self) -> None:
        """Compare the counts with the placements they stem from. Raises InternalError on any difference."""
        on: dict[Start, _On] = {}
        of_router: dict[int, set[int]] = {}
        for request_id, held in self._open.items():
            of_router.setdefault(held.router, set()).add(request_id)
            for leg in held.legs:
                one = on.setdefault(leg.start, _On())
                one.requests += 1
                one.prefill += leg.prefill
                one.tokens += leg.tokens
        shown = {start: (self.loads.prefill[at], self.loads.tokens[at]) for start, at in self._numbers.items()}
        right = {start: (one.prefill, one.tokens) for start in self._numbers for one in (on.get(start, _On()),)}
        if on != self._on or of_router != self._of_router or shown != right:
            raise InternalError(
                f"load has drifted: {len(self._open)} open placements, counted {self._on} for {on}, "
                f"routers {sorted(self._of_router)} for {sorted(of_router)}"
            )
