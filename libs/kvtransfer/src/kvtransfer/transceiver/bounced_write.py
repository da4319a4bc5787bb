"""One transfer through chunks, on the context rank: ask, gather, write, tell; several chunks at once.

packed range ── ChunkReady ─┬ room here to spare ─▶ gathered while the peer is asked ─ Grant ─┬─▶ written ─▶ told
                   ▲        └ none ─▶ Grant ─▶ room here ─▶ gathered ─────────────────────────┘
                   └──── the rest, where there is less room on either side than was asked for

Room here that waits for the peer is never more than half of it (`Credits.take_now`): what the peer has granted finds
the other half, so no two wait for each other, and a peer that does not answer does not stop what goes to others.
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
    from kvtransfer.transceiver.send_room import SendRoom


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
    """A chunk with room on a side: here at address `place`, in the arena of the peer at `offset`. None: not yet."""

    name: ChunkName
    begin: int
    end: int
    place: int | None = None
    offset: int | None = None
    copy: Copy | None = None
    handle: WriteHandle | None = None
    # When the copy began.
    began: float = 0.0
    gathered: bool = False


@dataclass(slots=True)
class Stages:
    """Seconds of all chunks together. `credit`: nothing could go on because room at the peer was waited for. `first`:
    from the first question until its answer. `post`: inside the post calls, which may write on the spot."""

    credit: float = 0.0
    first: float = 0.0
    gather: float = 0.0
    post: float = 0.0


class BouncedWrite:
    """Not thread-safe; looks like a `PiecedWrite`. `direct`: runs of the same order that are written as they are.

    `say`: to the peer. `room`: of the send arena.
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
        say: Callable[[ChunkReady | BounceChunk], None],
        room: SendRoom,
        number: Callable[[], int],
        clock: Callable[[], float],
        direct: PiecedWrite | None = None,
        reached: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._agent, self._copier, self._packed, self._route = agent, copier, packed, route
        self._depth, self._direct, self._clock, self._reached = depth, direct, clock, reached
        self._say, self._room, self._number = say, room, number
        self._rest = deque(parts)
        # Parts without room on either side.
        self._asked: dict[ChunkName, Part] = {}
        self._under_way: dict[ChunkName, _Chunk] = {}
        # Since when nothing goes on for want of room at the peer; None while something does.
        self._stalled: float | None = None
        self._first_asked = 0.0
        self.chunks, self.stages = 0, Stages()
        # Whether the last `look` has changed anything: what follows may be due at once.
        self.moved = False
        self._failure, self._peer_lost = "", False

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
        name, part = grant.name, self._asked.pop(grant.name, None)
        chunk = self._under_way.get(name) if part is None else _Chunk(name, part.begin, part.end)
        if chunk is None or chunk.offset is not None:
            return
        if grant.nbytes <= 0:
            self._drop("the peer gives no room for chunks: its receive is over")
            return
        now = self._clock()
        self.stages.first = self.stages.first or now - self._first_asked
        if self._stalled is not None:
            self.stages.credit += now - self._stalled
            self._stalled = None
        end = min(chunk.end, chunk.begin + grant.nbytes)
        self._again(end, chunk.end)
        chunk.end, chunk.offset = end, grant.offset
        if chunk.place is not None:
            self._room.keep(name)
        else:
            self._under_way[name] = chunk
            self._room.ask(name, end - chunk.begin)

    def place(self, name: ChunkName, offset: int, nbytes: int) -> None:
        """Room in the send arena that was waited for, perhaps less than asked for: the gather is due."""
        chunk = self._under_way.get(name)
        if chunk is None:
            self._room.free(name)
            return
        end = min(chunk.end, chunk.begin + nbytes)
        self._again(end, chunk.end)
        chunk.end, chunk.place = end, self._route.send + offset

    def look(self) -> WriteStatus:
        """Makes progress: posts at most one chunk, or begins at most one gather when none can be posted. DONE: every
        byte has arrived in the arena and has been told. FAILED: not every byte, and nothing is in flight any more."""
        self.moved = False
        self._ask()
        for chunk in tuple(self._under_way.values()):
            if chunk.handle is not None:
                self._look_at(chunk, chunk.handle)
            elif self._failure and (chunk.copy is None or self._copied(chunk, chunk.copy)):
                self._end(chunk)
        if not self._failure:
            self._go_on()
        beside = self._look_beside()
        if self._under_way or self._asked or self._rest or beside.state is WriteState.IN_FLIGHT:
            return WriteStatus(WriteState.IN_FLIGHT)
        if self._failure:
            return WriteStatus(WriteState.FAILED, self._failure, self._peer_lost)
        return beside

    def _go_on(self) -> None:
        """The one thing that is due: a post before a gather, so that the fabric is not kept waiting by copies."""
        due: tuple[_Chunk, int] | None = None
        stalled = bool(self._under_way or self._asked)
        for chunk in self._under_way.values():
            if chunk.copy is None:
                due = due or (None if chunk.place is None else (chunk, chunk.place))
                stalled = False
            elif chunk.handle is not None or not self._copied(chunk, chunk.copy):
                stalled = False
            elif chunk.place is not None and chunk.offset is not None:
                self._post(chunk, chunk.place, chunk.offset)
                return
        if due is not None:
            self._gather(*due)
        elif stalled and self._stalled is None:
            self._stalled = self._clock()

    def _gather(self, chunk: _Chunk, place: int) -> None:
        chunk.began, self.moved = self._clock(), True
        with nvtx.span("kv.gather"):
            chunk.copy = self._copier.gather(self._packed, chunk.begin, chunk.end, place)
        self._copied(chunk, chunk.copy)

    def _copied(self, chunk: _Chunk, copy: Copy) -> bool:
        """True when the chunk is gathered."""
        if not chunk.gathered and copy.done():
            chunk.gathered = True
            self.stages.gather += copy.seconds(self._clock() - chunk.began)
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
        while self._rest and len(self._asked) + len(self._under_way) < self._depth:
            if not self._reached(self._rest[0].layers):
                return
            part, route = self._rest.popleft(), self._route
            name = ChunkName(route.key, route.receive, route.src_rank, route.dst_rank, self._number())
            nbytes = part.end - part.begin
            at = self._room.now(self, name, nbytes)
            if at is None:
                self._asked[name] = part
            else:
                self._under_way[name] = _Chunk(name, part.begin, part.end, route.send + at)
            self._first_asked = self._first_asked or self._clock()
            self._say(ChunkReady(name, nbytes, route.host, route.window, route.layer_groups))

    def _again(self, begin: int, end: int) -> None:
        if begin < end and not self._failure:
            self._rest.appendleft(Part(begin, end))

    def _post(self, chunk: _Chunk, place: int, offset: int) -> None:
        size = np.array([chunk.end - chunk.begin], np.int64)
        source, target = np.array([place], np.int64), np.array([self._route.arena + offset], np.int64)
        began, self.moved = self._clock(), True
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
        if chunk.offset is not None:
            extent, groups = (chunk.begin, chunk.end, chunk.offset), route.layer_groups
            self._say(BounceChunk(chunk.name, route.window, *extent, groups, route.host))

    def _end(self, chunk: _Chunk) -> None:
        self.moved = True
        self._under_way.pop(chunk.name, None)
        self._room.free(chunk.name)

    def _drop(self, reason: str) -> None:
        """Nothing new begins. A copy or write under way is seen to its end, its memory is not free before."""
        self._failure = self._failure or reason or "the agent gives no reason"
        self._rest.clear()
        self._asked.clear()
        for chunk in [one for one in self._under_way.values() if one.copy is None]:
            self._end(chunk)
