"""The data plane: writes that land when they land, whatever has become of the one who posted them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.rank_info import AgentDescriptor

from .script import FaultKind
from .violation import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.regions import RegionPairs

    from .bounced import SimCopy
    from .clock import World
    from .memory import Arena
    from .pages import Hold, Pages

_IN_FLIGHT, _DONE = WriteStatus(WriteState.IN_FLIGHT), WriteStatus(WriteState.DONE)
_BROKEN = WriteStatus(WriteState.FAILED, "link error")
_GONE = WriteStatus(WriteState.FAILED, "the peer is gone", peer_lost=True)


# Longer than any write takes that is not late.
LATE_S = 0.5


@dataclass(eq=False, slots=True)
class Port:
    """The registered memory of one rank, as the fabric knows it. `alive`: the process is."""

    name: str
    arena: Arena
    pages: Pages
    alive: bool = True
    # Whose bytes lie in the words of the send arena.
    gathered: dict[int, Hold] = field(default_factory=dict["int", "Hold"])
    # When a late chunk has left its arena: others have waited for the room until then.
    room_since: float = 0.0
    # Copies between its pages and its arena. They are over with the process: its own memory is all they touch.
    copies: set[SimCopy] = field(default_factory=set["SimCopy"])


@dataclass(eq=False, slots=True)
class Write:
    """On the fabric. `words`: (source word, destination word) indexes that have not landed. `holds`: both ends."""

    source: Port
    remote: str
    target: Port
    words: list[tuple[int, int]]
    holds: tuple[Hold, Hold]
    chunk: bool
    began: float
    status: WriteStatus = _IN_FLIGHT
    fail: bool = False
    silent: bool = False
    over: bool = False

    def end(self, status: WriteStatus, now: float) -> None:
        """No byte of it moves any more; to be called once."""
        self.over = True
        for hold in self.holds:
            hold.writes -= 1
            hold.quiet_since = now
            hold.unheard |= self.silent
        if self.chunk and now - self.began > LATE_S:
            self.target.room_since = now
        if not self.silent:
            self.status = status


class Fabric:
    """All ports and all writes between them."""

    def __init__(self, world: World, flaky: float) -> None:
        self.world, self._flaky = world, flaky
        self.ports: dict[str, Port] = {}
        self.open: set[Write] = set()

    def post(self, port: Port, pairs: RegionPairs, remote: str, armed: FaultKind | None) -> Write:
        """Starts a write. Raises Violation when it does not lead from an attempt's pages to the same attempt's."""
        target, world = self.ports[remote], self.world
        words = _words(pairs, port.arena.base, target.arena.base)
        chunk = any(dst >= target.arena.pages_words for _, dst in words)
        holds = _chunk_ends(port, target, words) if chunk else _ends(port, target, words)
        fails = armed is FaultKind.WRITE_FAILS or world.random.random() < self._flaky
        write = Write(port, remote, target, words, holds, chunk, world.now, fail=fails)
        if chunk:
            self._share_no_word(write)
        write.silent = armed is FaultKind.COMPLETION_LOST
        for hold in holds:
            hold.writes += 1
            hold.posted = True
        self.open.add(write)
        longest = 6.0 if armed is FaultKind.WRITE_LATE or world.random.random() < 0.03 else 0.1
        delay = world.random.random() * longest
        if len(words) > 1 and (write.fail or world.random.random() < 0.3):
            world.at(delay * world.random.random(), self._land, write, len(words) // 2)
        world.at(delay, self._finish, write)
        world.note(
            "post",
            port.name,
            "->",
            remote,
            holds[1].key,
            "a chunk" if chunk else "",
            "" if armed is None else armed.value,
        )
        return write

    def _share_no_word(self, write: Write) -> None:
        """A chunk is written into the arena, where nobody else may still write."""
        mine = {dst for _, dst in write.words}
        if max(mine) >= len(write.target.arena.words):
            raise Violation(f"{write.source.name} writes beyond the memory of {write.remote}")
        for other in self.open:
            if other.target is write.target and mine & {dst for _, dst in other.words}:
                raise Violation(f"{write.source.name} and {other.source.name} write into one chunk of {write.remote}")

    def cut(self, port: Port) -> None:
        """The fabric has drained what a dead process had posted."""
        for write in [one for one in self.open if one.source is port]:
            self._close(write, _GONE)

    def _finish(self, write: Write) -> None:
        self._land(write, 0 if not write.fail else 1)
        self._close(write, _BROKEN if write.fail else _DONE)

    def _close(self, write: Write, status: WriteStatus) -> None:
        if write.over:
            return
        self.open.discard(write)
        write.end(status, self.world.now)
        self.world.note("write over", write.source.name, write.holds[1].key, status.state.name)

    def _land(self, write: Write, keep: int) -> None:
        """Bytes arrive, all but the last `keep` words. Nobody may be surprised by them."""
        if write.over:
            return
        if not write.target.alive:
            self._close(write, _GONE)
            return
        source, target = write.source, write.target
        while len(write.words) > keep:
            src, dst = write.words.pop(0)
            if dst >= target.arena.pages_words:
                target.arena.words[dst] = source.arena.words[src]
                continue
            page = src // source.arena.size
            if source.pages.owner[page] is not write.holds[0]:
                raise Violation(f"{source.name} reused source page {page} under a write of {write.holds[0].key}")
            page = dst // target.arena.size
            holder = target.pages.owner[page]
            if holder is not write.holds[1] or write.holds[1].closed:
                who = "nobody" if holder is None else str(holder.key)
                where = f"page {page} of {target.name}, held by {who}"
                raise Violation(f"late write of {write.holds[1].key} hit {where}")
            target.arena.words[dst] = source.arena.words[src]


def _words(pairs: RegionPairs, src_base: int, dst_base: int) -> list[tuple[int, int]]:
    words: list[tuple[int, int]] = []
    for src, dst, size in zip(pairs.src.tolist(), pairs.dst.tolist(), pairs.lengths.tolist(), strict=True):
        a, b = (src - src_base) >> 3, (dst - dst_base) >> 3
        words += [(a + i, b + i) for i in range(size >> 3)]
    return words


def _ends(port: Port, target: Port, words: list[tuple[int, int]]) -> tuple[Hold, Hold]:
    """The holds at both ends. Violation when a page is free, closed, or another attempt's."""
    ends: list[Hold] = []
    sources, targets = {src // port.arena.size for src, _ in words}, {dst // target.arena.size for _, dst in words}
    for side, pages in ((port, sources), (target, targets)):
        found = {side.pages.owner[page] for page in pages}
        hold = found.pop()
        if found or hold is None or hold.closed:
            raise Violation(f"{port.name} writes to {target.name} with pages {sorted(pages)} of {side.name} not held")
        ends.append(hold)
    if ends[0].key != ends[1].key:
        raise Violation(f"{port.name} writes {ends[0].key} into the pages of {ends[1].key} on {target.name}")
    return ends[0], ends[1]


def _chunk_ends(port: Port, target: Port, words: list[tuple[int, int]]) -> tuple[Hold, Hold]:
    """The holds that a chunk comes from and goes to. Violation when one of them is over."""
    source = port.gathered[words[0][0]]
    found = [one for one in target.pages.owner if one is not None and one.key == source.key and not one.closed]
    if source.closed or not found or any(port.gathered[src] is not source for src, _ in words):
        raise Violation(f"{port.name} writes a chunk of {source.key} to {target.name}, where it is over")
    return source, found[0]


@dataclass(eq=False)
class SimAgent:
    """See agents.base.Agent: as much of it as the rank role uses. `armed`: what happens to the next writes."""

    fabric: Fabric
    port: Port
    armed: list[FaultKind] = field(default_factory=list[FaultKind])
    _open: set[Write] = field(default_factory=set[Write])

    @property
    def name(self) -> str:
        """Unique over time."""
        return self.port.name

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        """Others may write here."""
        self.fabric.ports[self.port.name] = self.port

    def descriptor(self) -> AgentDescriptor:
        """Nothing but the name is needed."""
        return AgentDescriptor("sim", self.port.name, b"")

    def load_remote(self, remote: AgentDescriptor, regions: Sequence[RegisteredRegion]) -> None:
        """Nothing to open."""

    def forget_remote(self, name: str) -> None:
        """Violation under an open write."""
        if any(write.remote == name for write in self._open):
            raise Violation(f"{name} is forgotten under an open write")

    def path(self, remote: str) -> str:
        """How bytes travel here."""
        return "sim"

    def submit(self, pairs: RegionPairs, remote: str) -> Write:
        """Posts."""
        write = self.fabric.post(self.port, pairs, remote, self.armed.pop() if self.armed else None)
        self._open.add(write)
        return write

    def poll(self, handle: Write) -> WriteStatus:
        """What the agent says, which may be less than what is."""
        return handle.status

    def release(self, handle: Write) -> None:
        """Once per handle."""
        self._open.remove(handle)

    def close(self) -> None:
        """Nothing to end."""
