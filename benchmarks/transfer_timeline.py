"""What each side of a measured pair does when: calls of the rank, its planner, its agent and its copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_half import Half

# Looks at something that is not over yet are left out: shorter than this, and there are thousands.
SHORTEST_S = 40e-6


@dataclass(slots=True)
class Marks:
    """(begin, end, what) in seconds of the machine's monotonic clock, which all processes share."""

    side: str
    seen: list[tuple[float, float, str]] = field(default_factory=list[tuple[float, float, str]])

    def now(self, what: str) -> None:
        """Something happened."""
        at = time.perf_counter()
        self.seen.append((at, at, what))

    def watch(self, owner: Any, method: str, *, short: bool = True) -> None:
        """Notes the calls of a method from now on; without `short` only those that last."""
        call: Callable[..., Any] = getattr(owner, method)

        def noted(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                ended = time.perf_counter()
                if short or ended - began >= SHORTEST_S:
                    subject = type(arguments[-1]).__name__ if method in ("handle", "said") else ""
                    self.seen.append((began, ended, f"{method} {subject}".strip()))

        setattr(owner, method, noted)

    def take(self) -> list[tuple[str, float, float, str]]:
        """What was noted, with the side."""
        seen, self.seen = self.seen, []
        return [(self.side, *one) for one in seen]


def watch_half(half: Half, side: str) -> Marks:
    """Notes what one side does."""
    marks = Marks(side)
    rank, bouncing = half.rank, half.rank._bouncing  # pyright: ignore[reportPrivateUsage]
    marks.watch(half.copier, "gather")
    marks.watch(half.copier, "scatter")
    marks.watch(half.agent, "submit")
    marks.watch(half.agent, "release")
    marks.watch(half.agent, "poll", short=False)
    marks.watch(rank._chooser, "choose")  # pyright: ignore[reportPrivateUsage]
    marks.watch(bouncing, "_packed_of")
    marks.watch(rank, "handle")
    marks.watch(rank, "poll", short=False)
    return marks


def lines(seen: list[tuple[str, float, float, str]]) -> list[str]:
    """One line for each call in order of time: begin and length in us, side, what."""
    first = min(begin for _, begin, _, _ in seen)
    return [
        f"{(begin - first) * 1e6:9.0f} {(end - begin) * 1e6:7.0f} us  {side:10} {what}"
        for side, begin, end, what in sorted(seen, key=lambda one: (one[1], -one[2]))
    ]
