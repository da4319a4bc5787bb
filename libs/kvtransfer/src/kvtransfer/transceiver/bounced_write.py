"""One transfer through chunks, on the context rank: ask, gather, write, tell; several chunks at once.

range of packed bytes ── ChunkReady ─▶ asked ── Grant ─▶ granted ── room here ─▶ gathering ── copied ─▶ written ─▶ told
                            ▲                              └ the rest of a small grant ┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer import nvtx
from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.bounce_ports import BounceChunk, ChunkName, ChunkReady, Grant
from kvtransfer.errors import AgentError, PeerLost
from kvtransfer.regions import RegionPairs
from kvtransfer.transceiver.layer_progress import ALL_LAYERS
from kvtransfer.transceiver.parts import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.agents.base import Agent, WriteHandle
    from kvtransfer.bounce.copying import Copier, Copy
    from kvtransfer.packed import Packed
    from kvtransfer.ports import RequestKey, TokenRange
    from kvtransfer.transceiver.pieced_write import PiecedWrite


@dataclass(frozen=True, slots=True)
class Route:
    """Whose chunks these are, and where they go. `send` and `arena`: addresses of the arenas of both sides; `host`:
    the one of the peer is its arena on the host, where its cache is not."""

    key: RequestKey
    receive: int
    src_rank: int
    dst_rank: int
    remote: str
    send: int
    arena: int
    window: TokenRange
    layer_groups: tuple[int, ...]
    host: bool = False


@dataclass(slots=True, eq=False)
class _Chunk:
    name: ChunkName
    begin: int
    end: int
    offset: int
    place: int = -1
    copy: Copy | None = None
    handle: WriteHandle | None = None
    # When the copy began.
    began: float = 0.0
    gathered: bool = False


@dataclass(slots=True)
class Stages:
    """Seconds of all chunks together. `credit`: nothing could go on because room at the peer was waited for; `first`
    of it: until the first chunk had room. `post`: inside the post calls, which may write on the spot."""

    credit: float = 0.0
    first: float = 0.0
    gather: float = 0.0
    post: float = 0.0


class BouncedWrite:
    """Not thread-safe; looks like a `PiecedWrite`. `direct`: runs of the same order that are written as they are.

    `speak` comes first. `ask_room(name, nbytes)` and `free_room(name)`: the send arena, answered by `place`.
    `parts`: the chunks, in the order of sending. `number()`: the rank's own count of chunks. `clock` in seconds,
    monotonic. `reached(layer)`: False while a layer below that global number is still being computed.
    """

    def __init__(
        self,
        agent: Agent,
        copier: Copier,
        packed: Packed,
        route: Route,
        parts: Sequence[Part],
        depth: int,
        ask_room: Callable[[ChunkName, int], None],
        free_room: Callable[[ChunkName], None],
        number: Callable[[], int],
        clock: Callable[[], float],
        direct: PiecedWrite | None = None,
        reached: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._agent, self._copier, self._packed, self._route = agent, copier, packed, route
        self._depth, self._direct, self._clock, self._reached = depth, direct, clock, reached
        self._ask_room, self._free_room, self._number = ask_room, free_room, number
        self._say: Callable[[ChunkReady | BounceChunk], None] | None = None
        self._rest = deque(parts)
        self._asked: dict[ChunkName, tuple[int, int]] = {}
        self._under_way: dict[ChunkName, _Chunk] = {}
        # Since when nothing goes on for want of room; None while something does.
        self._stalled: float | None = None
        self.chunks, self.stages = 0, Stages()
        self._failure, self._peer_lost = "", False

    def speak(self, say: Callable[[ChunkReady | BounceChunk], None]) -> None:
        """How the peer is told."""
        self._say = say

    @property
    def can_post(self) -> bool:
        """Never: chunks are posted by `look`, runs beside them too."""
        return False

    def post(self) -> None:
        """Asks for the first chunks, so that the answers come while other work is done."""
        self._ask()

    def cancel(self, reason: str) -> None:
        """Nothing more is asked for, gathered or posted. If everything has been posted, it goes on."""
        unposted = any(one.handle is None for one in self._under_way.values())
        if self._direct is not None:
            self._direct.cancel(reason)
        if self._rest or self._asked or unposted:
            self._drop(reason)

    def granted(self, grant: Grant) -> None:
        """Room in the arena of the peer, perhaps less than asked for. Not for a chunk that nobody waits for."""
        asked = self._asked.pop(grant.name, None)
        if asked is None:
            return
        if grant.nbytes <= 0:
            self._drop("the peer gives no room for chunks: its receive is over")
            return
        if self._stalled is not None:
            self.stages.credit += self._clock() - self._stalled
            self.stages.first = self.stages.first or self.stages.credit
            self._stalled = None
        begin, end = asked[0], min(asked[1], asked[0] + grant.nbytes)
        self._again(end, asked[1])
        self._under_way[grant.name] = _Chunk(grant.name, begin, end, grant.offset)
        self._ask_room(grant.name, end - begin)

    def place(self, name: ChunkName, offset: int, nbytes: int) -> None:
        """Room in the send arena, perhaps less than asked for: the gather begins."""
        chunk = self._under_way.get(name)
        if chunk is None:
            self._free_room(name)
            return
        end = min(chunk.end, chunk.begin + nbytes)
        self._again(end, chunk.end)
        chunk.end, chunk.place = end, self._route.send + offset
        chunk.began = self._clock()
        with nvtx.span("kv.gather"):
            chunk.copy = self._copier.gather(self._packed, chunk.begin, end, chunk.place)
        self._copied(chunk, chunk.copy)

    def look(self) -> WriteStatus:
        """Makes progress, posts at most one chunk. DONE: every byte has arrived in the arena and has been told. FAILED:
        not every byte, and nothing is in flight any more."""
        self._ask()
        posted = False
        for chunk in tuple(self._under_way.values()):
            if chunk.handle is not None:
                self._look_at(chunk, chunk.handle)
            elif chunk.copy is not None and self._copied(chunk, chunk.copy):
                if self._failure:
                    self._end(chunk)
                elif not posted:
                    self._post(chunk)
                    posted = True
        if self._asked and not self._under_way and self._stalled is None:
            self._stalled = self._clock()
        beside = self._look_beside()
        if self._under_way or self._asked or self._rest or beside.state is WriteState.IN_FLIGHT:
            return WriteStatus(WriteState.IN_FLIGHT)
        if self._failure:
            return WriteStatus(WriteState.FAILED, self._failure, self._peer_lost)
        return beside

    def _copied(self, chunk: _Chunk, copy: Copy) -> bool:
        """True when the chunk is gathered."""
        if not chunk.gathered and copy.done():
            chunk.gathered = True
            self.stages.gather += self._clock() - chunk.began
        return chunk.gathered

    def _look_beside(self) -> WriteStatus:
        direct = self._direct
        if direct is None:
            return WriteStatus(WriteState.DONE)
        if direct.can_post and self._reached(ALL_LAYERS):
            try:
                direct.post()
            except AgentError as error:
                self._drop(str(error))
        status = direct.look()
        if status.state is WriteState.FAILED:
            self._peer_lost |= status.peer_lost
            self._drop(status.reason)
        return status

    def _ask(self) -> None:
        while self._say is not None and self._rest and len(self._asked) + len(self._under_way) < self._depth:
            if not self._reached(self._rest[0].layers):
                return
            part, route = self._rest.popleft(), self._route
            name = ChunkName(route.key, route.receive, route.src_rank, route.dst_rank, self._number())
            self._asked[name] = (part.begin, part.end)
            self._say(ChunkReady(name, part.end - part.begin, route.host))

    def _again(self, begin: int, end: int) -> None:
        if begin < end and not self._failure:
            self._rest.appendleft(Part(begin, end))

    def _post(self, chunk: _Chunk) -> None:
        size = np.array([chunk.end - chunk.begin], np.int64)
        source, target = np.array([chunk.place], np.int64), np.array([self._route.arena + chunk.offset], np.int64)
        began = self._clock()
        try:
            with nvtx.span("kv.post"):
                chunk.handle = self._agent.submit(RegionPairs(source, target, size), self._route.remote)
        except AgentError as error:
            self._peer_lost |= isinstance(error, PeerLost)
            self._drop(str(error))
            self._end(chunk)
        self.stages.post += self._clock() - began

    def _look_at(self, chunk: _Chunk, handle: WriteHandle) -> None:
        status = self._agent.poll(handle)
        if status.state is WriteState.IN_FLIGHT:
            return
        self._agent.release(handle)
        self._end(chunk)
        if status.state is WriteState.FAILED:
            self._peer_lost |= status.peer_lost
            self._drop(status.reason)
            return
        self.chunks += 1
        route = self._route
        if self._say is not None:
            extent, groups = (chunk.begin, chunk.end, chunk.offset), route.layer_groups
            self._say(BounceChunk(chunk.name, route.window, *extent, groups, route.host))

    def _end(self, chunk: _Chunk) -> None:
        self._under_way.pop(chunk.name, None)
        self._free_room(chunk.name)

    def _drop(self, reason: str) -> None:
        """Nothing new begins. A copy or write under way is seen to its end, its memory is not free before."""
        self._failure = self._failure or reason or "the agent gives no reason"
        self._rest.clear()
        self._asked.clear()
        for chunk in [one for one in self._under_way.values() if one.copy is None]:
            self._end(chunk)
