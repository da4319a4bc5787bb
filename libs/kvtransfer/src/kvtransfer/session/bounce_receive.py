"""The generation side of chunks: room in the arenas of its ranks, scatters under way, and what has to wait for them.

    ChunkReady ─▶ WAITING ── room ─▶ GRANTED ── BounceChunk ─▶ SCATTERING ── Scattered ─▶ free
                     └─ the writer's last word, or the end of the receive ─▶ free (GRANTED), dropped (WAITING)

A grant is memory that its writer may still write: it is taken back when its chunk is scattered, when the writer has
said its last word, or when the receive has been settled, which needs that word or a proof of death. Two things wait for
scatters: the DELIVERED of a writer, since its bytes are not in the pages before, and the settled outcome of a receive,
since pages must not be used while something is copied into them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.bounce.credits import Credits
from kvtransfer.bounce_ports import (
    BounceChunk,
    ChunkName,
    ChunkReady,
    Grant,
    MeetSource,
    PrepareScatter,
    Scattered,
    ScatterOrder,
)
from kvtransfer.errors import ProtocolError
from kvtransfer.ports import ReceiveOutcome, WriterOutcome
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToRank, ToScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.messages import KvRequest
    from kvtransfer.ports import RankBlocks, RequestKey, TokenRange, TransferNotice
    from kvtransfer.rank_info import InstanceInfo

log = logging.getLogger(__name__)

# Of one writer: several windows of a prompt at once, each with as many chunks as may be under way.
MOST_ASKED = 1 << 10

Writer = tuple[int, int]
# A rank, and whether its arena on the host is meant: `RankInfo.host_arena`.
Place = tuple[int, bool]


@dataclass(slots=True)
class _Written:
    """What one writer has sent."""

    # Window and layer groups that the rank has been told to get ready for.
    prepared: set[tuple[TokenRange, tuple[int, ...]]] = field(default_factory=set["tuple[TokenRange, tuple[int, ...]]"])
    # Chunks that it has asked for.
    asked: int = 0
    seen: set[int] = field(default_factory=set[int])
    scattering: set[ChunkName] = field(default_factory=set[ChunkName])
    problem: str = ""
    over: bool = False
    # Seconds of all scatters.
    seconds: float = 0.0
    # Its last word, until everything is scattered.
    notice: TransferNotice | None = None


@dataclass(slots=True)
class _Receive:
    """One KvRequest that a peer serves."""

    peer: PeerId
    request: KvRequest
    writers: dict[Writer, _Written] = field(default_factory=dict[Writer, _Written])
    # Its settled outcome, until everything is scattered.
    outcome: ReceiveOutcome | None = None

    def writer(self, name: ChunkName) -> _Written:
        return self.writers.setdefault((name.src_rank, name.dst_rank), _Written())

    @property
    def scatters(self) -> bool:
        """True while something is copied into its pages."""
        return any(one.scattering for one in self.writers.values())


class BounceReceive:
    """All receives of one generation instance. `unit_bytes`: room that every peer is sure of in each arena, for at most
    `max_peers` of them. `emit` must not call back. Raises ArenaError when an arena is too small for that."""

    def __init__(self, local: InstanceInfo, unit_bytes: int, max_peers: int, emit: Emit) -> None:
        self._local, self._emit = local, emit
        regions = {
            (one.rank, host): one.host_arena if host else one.arena for one in local.ranks for host in (False, True)
        }
        self._sizes = {place: region.size_bytes for place, region in regions.items() if region is not None}
        self._arenas: dict[Place, Credits[PeerId, ChunkName]] = {
            place: Credits(size, unit_bytes, max_peers) for place, size in self._sizes.items()
        }
        self._receives: dict[RequestKey, _Receive] = {}
        self._gone: set[int] = set()

    @property
    def is_idle(self) -> bool:
        """True when no room is taken and nothing waits."""
        return all(one.is_idle for one in self._arenas.values()) and not self.waiting

    @property
    def waiting(self) -> tuple[RequestKey, ...]:
        """Receives that are settled but for scatters into their pages."""
        return tuple(key for key, one in self._receives.items() if one.outcome is not None)

    def granted_bytes(self, rank: int) -> int:
        """Bytes of a rank's arenas that are granted."""
        return sum(self._sizes[place] - arena.free_bytes for place, arena in self._arenas.items() if place[0] == rank)

    # --- peers

    def meet(self, peer: PeerId, info: InstanceInfo) -> None:
        """The peer may send chunks from now on: ranks with an arena keep room for it and get ready to scatter."""
        for arena in self._arenas.values():
            arena.connect(peer)
        for rank in sorted({rank for rank, _ in self._arenas}):
            self._emit(ToRank(rank, MeetSource(info, self._local)))

    def forget(self, peer: PeerId) -> None:
        """The peer is gone; what its writers still may write stays taken until their receives are settled."""
        for arena in self._arenas.values():
            arena.disconnect(peer)

    # --- the life of a receive

    def asked(self, peer: PeerId, request: KvRequest) -> None:
        """A KvRequest is about to be said: its writers may send chunks."""
        if self._arenas:
            self._receives[request.key] = _Receive(peer, request)

    def said(self, peer: PeerId, message: ChunkReady | BounceChunk) -> None:
        """Either of the two below."""
        if isinstance(message, ChunkReady):
            self.ready(peer, message)
        else:
            self.chunk(peer, message)

    def ready(self, peer: PeerId, ready: ChunkReady) -> None:
        """A writer asks for room, or asks again after a reconnect: then it is told again what it has. One whose receive
        is over gets no answer: its cancel is on the way. Raises ProtocolError for a rank without arena."""
        name = ready.name
        receive = self._of(peer, name)
        if receive is None or receive.outcome is not None or receive.writer(name).over:
            return
        arena = self._arenas.get((name.dst_rank, ready.host))
        if arena is None:
            where = " on the host" if ready.host else ""
            raise ProtocolError(f"ChunkReady names rank {name.dst_rank}, which has no arena{where}")
        if (given := arena.find(name)) is not None:
            self._emit(ToPeer(peer, Grant(name, given.offset, given.nbytes)))
        elif not arena.knows(name):
            writer = receive.writer(name)
            if writer.asked - len(writer.seen) >= MOST_ASKED:
                raise ProtocolError(f"rank {name.src_rank} asks for more than {MOST_ASKED} chunks at once")
            writer.asked += 1
            arena.ask(peer, name, ready.nbytes)
            self._give(arena)
            self._prepare(peer, ready, receive, writer)

    def chunk(self, peer: PeerId, chunk: BounceChunk) -> None:
        """A chunk has been written. Nothing happens when its receive is over, or it has come before. Raises
        ProtocolError when it is not what was granted."""
        name = chunk.name
        receive = self._of(peer, name)
        if receive is None or receive.outcome is not None:
            log.debug("chunk %s is not waited for", name)
            return
        writer = receive.writer(name)
        if writer.over or name.seq in writer.seen:
            # Said again after a reconnect.
            return
        arena = self._arenas.get((name.dst_rank, chunk.host))
        granted = None if arena is None else arena.find(name)
        if granted is None or granted.offset != chunk.offset or chunk.end - chunk.begin > granted.nbytes:
            raise ProtocolError(f"chunk {name} was written where nothing was granted")
        writer.seen.add(name.seq)
        writer.scattering.add(name)
        order = ScatterOrder(*peer, chunk, receive.request.tokens, _mine(receive.request, name))
        self._emit(ToRank(name.dst_rank, order))

    def scattered(self, rank: int, done: Scattered) -> list[tuple[PeerId, TransferNotice]]:
        """A rank does not need a chunk any more. Returns last words that waited for it: they are to be told again."""
        return self._over([done.name], done.problem, done.seconds) if done.name.dst_rank == rank else []

    def rank_exited(self, rank: int, reason: str) -> list[tuple[PeerId, TransferNotice]]:
        """A rank of this instance is gone, its arena with it. Returns as `scattered`."""
        names = [
            name
            for receive in self._receives.values()
            for writer in receive.writers.values()
            for name in writer.scattering
            if name.dst_rank == rank
        ]
        words = self._over(names, f"rank {rank} of the generation instance exited: {reason}")
        for place in [one for one in self._arenas if one[0] == rank]:
            del self._arenas[place]
        self._gone.add(rank)
        return words

    def screen(self, peer: PeerId, notice: TransferNotice, *, final: bool = False) -> TransferNotice | None:
        """A writer's last word as it may be told now; None while its chunks are being scattered, or missing: a broken
        stream has lost them, and they are said again when it is reconciled. `final`: they will not be, so it has not
        delivered."""
        receive = self._receives.get(notice.key)
        if receive is None or (receive.peer, receive.request.receive) != (peer, notice.receive):
            return notice
        pair = (notice.src_rank, notice.dst_rank)
        writer = receive.writers.setdefault(pair, _Written())
        missing = notice.chunks - len(writer.seen) if notice.outcome is WriterOutcome.DELIVERED else 0
        if missing and not final:
            writer.notice = notice
            return None
        writer.over = True
        self._take_back(receive, pair)
        if notice.outcome is not WriterOutcome.DELIVERED:
            return notice
        if missing or writer.problem:
            problem = writer.problem or f"{missing} of {notice.chunks} chunks were lost with their stream"
            return notice._replace(outcome=WriterOutcome.QUIESCED, extents=(), reason=problem)
        writer.notice = notice if writer.scattering else None
        if writer.scattering:
            return None
        # Only this side knows what its copies took.
        return notice._replace(stats=notice.stats._replace(scatter=writer.seconds)) if writer.seen else notice

    def hold(self, outcome: ReceiveOutcome) -> bool:
        """True when the outcome has to wait for scatters; it is told then. Every grant of the receive comes back."""
        receive = self._receives.get(outcome.key)
        if receive is None or not outcome.settled:
            return False
        for pair in set(receive.writers):
            self._take_back(receive, pair)
        if receive.scatters:
            receive.outcome = outcome
            return True
        del self._receives[outcome.key]
        return False

    # --- steps

    def _prepare(self, peer: PeerId, ready: ChunkReady, receive: _Receive, writer: _Written) -> None:
        """The rank plans its copies while the first chunk is on its way."""
        name, request = ready.name, receive.request
        if ready.window is None or (part := (ready.window, ready.layer_groups)) in writer.prepared:
            return
        writer.prepared.add(part)
        order = PrepareScatter(*peer, name, *part, request.tokens, _mine(request, name))
        self._emit(ToRank(name.dst_rank, order))

    def _of(self, peer: PeerId, name: ChunkName) -> _Receive | None:
        receive = self._receives.get(name.key)
        mine = receive is not None and (receive.peer, receive.request.receive) == (peer, name.receive)
        return receive if mine and name.dst_rank not in self._gone else None

    def _take_back(self, receive: _Receive, pair: Writer) -> None:
        """Grants that the writer will not use, and what it waits for."""
        key, number = receive.request.key, receive.request.receive
        for arena in self._of_rank(pair[1]):
            for name in arena.names():
                if (name.key, name.receive, name.src_rank, name.dst_rank) != (key, number, *pair):
                    continue
                arena.drop(name)
                if name not in receive.writers[pair].scattering:
                    arena.give_back(name)
            self._give(arena)

    def _over(
        self, names: Sequence[ChunkName], problem: str, seconds: float = 0.0
    ) -> list[tuple[PeerId, TransferNotice]]:
        words: list[tuple[PeerId, TransferNotice]] = []
        for name in names:
            receive = self._receives.get(name.key)
            if receive is None or name not in receive.writer(name).scattering:
                continue
            writer = receive.writer(name)
            writer.scattering.discard(name)
            writer.problem = writer.problem or problem
            writer.seconds += seconds
            for arena in self._of_rank(name.dst_rank):
                arena.give_back(name)
            if writer.notice is not None and not writer.scattering:
                words.append((receive.peer, writer.notice))
                writer.notice = None
            if receive.outcome is not None and not receive.scatters:
                del self._receives[name.key]
                self._emit(ToScheduler(receive.outcome))
        for rank in {name.dst_rank for name in names}:
            for arena in self._of_rank(rank):
                self._give(arena)
        return words

    def _of_rank(self, rank: int) -> list[Credits[PeerId, ChunkName]]:
        return [arena for place, arena in self._arenas.items() if place[0] == rank]

    def _give(self, arena: Credits[PeerId, ChunkName]) -> None:
        for given in arena.give():
            receive = self._receives[given.ticket.key]
            self._emit(ToPeer(receive.peer, Grant(given.ticket, given.offset, given.nbytes)))


def _mine(request: KvRequest, name: ChunkName) -> tuple[RankBlocks, ...]:
    """The lists of the rank that the chunk is for."""
    return tuple(one for one in request.destinations if one.rank == name.dst_rank)
