"""What an instance remembers of its latest legs: a bounded ring, in memory, whether or not anything is traced."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from isthmus_worker.marks import MarkKind

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from kvtransfer.ports import TransferStats

MAX_ENTRIES = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that happened to a leg. `begin_ns` in Unix time; `tokens`: [begin, end) of a prefill chunk, (0, n) for
    n decoded tokens; `ranks`: (source, destination) of a transfer; `stats`: of transfers and receives."""

    kind: MarkKind
    begin_ns: int
    duration_ns: int = 0
    tokens: tuple[int, int] = (0, 0)
    ranks: tuple[int, int] = (0, 0)
    stats: TransferStats | None = None
    outcome: str = ""
    reason: str = ""

    @property
    def end_ns(self) -> int:
        """When it was over."""
        return self.begin_ns + self.duration_ns


@dataclass(slots=True)
class LegTimeline:
    """One leg. `end_ns` 0 and `outcome` empty while it runs; entries may follow its end, as those of a hand-off do."""

    key: RequestKey
    leg: str
    begin_ns: int
    prompt_tokens: int
    trace_id: bytes = b""
    peer: str = ""
    end_ns: int = 0
    outcome: str = ""
    reason: str = ""
    cached_tokens: int = 0
    left_out: int = 0
    entries: list[Entry] = field(default_factory=list[Entry])

    def note(self, entry: Entry) -> None:
        """One entry more; there are never more than MAX_ENTRIES."""
        if len(self.entries) < MAX_ENTRIES:
            self.entries.append(entry)
        else:
            self.left_out += 1


class Timelines:
    """The latest `capacity` legs by key. One thread owns it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._legs: OrderedDict[RequestKey, LegTimeline] = OrderedDict()

    def open(self, timeline: LegTimeline) -> None:
        """A leg has come; the oldest one is forgotten."""
        if not self._capacity:
            return
        self._legs[timeline.key] = timeline
        if len(self._legs) > self._capacity:
            self._legs.popitem(last=False)

    def get(self, key: RequestKey) -> LegTimeline | None:
        """None when it was never here, or is forgotten."""
        return self._legs.get(key)

    def of(self, request_id: int) -> list[LegTimeline]:
        """Every attempt at a request that is remembered, in order."""
        return [one for key, one in self._legs.items() if key.request_id == request_id]

    def latest(self, limit: int) -> list[LegTimeline]:
        """The latest legs, the last one first."""
        newest: Iterator[LegTimeline] = reversed(self._legs.values())
        return list(islice(newest, limit))


def on_wall_clock(entry: Entry, offset_ns: int) -> Entry:
    """An entry of the monotonic clock in Unix time."""
    return replace(entry, begin_ns=entry.begin_ns + offset_ns)
