"""A virtual world for hand-offs: the real hub core, rank role and scheduler role on a seeded clock, network and fabric.

Nothing sleeps. Writes carry the code of their attempt and are stamped into real memory when they *land*, which may be
long after anybody wants them: a page that was given away too early shows the wrong code.
"""

from __future__ import annotations

import ctypes
import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hub_world import NO_TRACING
from kv_storage import GUARD, MODEL, Shape, Storage
from kvtransfer import compatibility, peer_plan
from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.config import TransferConfig
from kvtransfer.control.generation import PairStatus, PeerAddress
from kvtransfer.errors import ProtocolError
from kvtransfer.hub.core import HubCore
from kvtransfer.messages import Envelope, PeerBody
from kvtransfer.page_table import PageTable
from kvtransfer.ports import HubToRank, HubToScheduler, RankToHub, RequestKey, SchedulerToHub
from kvtransfer.rank_info import AgentDescriptor, InstanceInfo, InstanceRole, RankInfo, Topology
from kvtransfer.transceiver.rank import RankTransceiver
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.regions import RegionPairs
    from kvtransfer.session.actions import EndReason, PeerId

RANKS = 2
SHAPE = Shape(layers=(0,), heads=1, unit=8, tokens_per_block=1)
CONFIG = TransferConfig("sim", timeout_s=3, handoff_hold_s=4, drain_s=0.3, ping_s=1)
TICK_S = 0.2


_ARENAS: dict[tuple[str, int, int], tuple[Storage, PageTable]] = {}


def arena(name: str, life: int, rank: int, pages: int) -> tuple[Storage, PageTable]:
    """Memory of the n-th life of an instance in a schedule. The same in every schedule, so that plans are made once."""
    place = (name, life, rank)
    if place not in _ARENAS:
        storage = Storage(SHAPE, "slot_major", pages)
        _ARENAS[place] = (storage, storage.page_table())
    storage, table = _ARENAS[place]
    storage.memory[:] = 0xEE
    return storage, table


@contextmanager
def plans_made_once() -> Generator[None]:
    """Plans and validation depend on the page tables alone, and those are the same in every schedule: most of the time
    of a schedule would go there."""
    made: dict[tuple[object, ...], object] = {}

    def remember(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            tables = (id(getattr(one, "page_table", one)) if not isinstance(one, str) else one for one in args)
            place = (function, *tables)
            if place not in made:
                made[place] = function(*args)
            return made[place]

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compatibility, "check_storage", remember(compatibility.check_storage))
        patch.setattr(peer_plan, "build_plan", remember(peer_plan.build_plan))
        patch.setattr(PageTable, "validate", remember(PageTable.validate))
        yield


class Violation(AssertionError):
    """Something that must never happen has happened."""


def code_of(key: RequestKey, rank: int) -> int:
    """What the source pages of an attempt hold on one rank."""
    return (key.request_id << 16 | key.attempt << 4 | rank | 8) & (1 << 63) - 1


class World:
    """The clock, the random numbers and everything that is on its way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        # Share of writes that fail half-way; some worlds have bad links.
        self.failing = 0.3 if self.random.random() < 0.2 else 0.04
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        self.lives: Counter[str] = Counter()
        self.writes: list[Write] = []
        self.memory: dict[str, tuple[Node, int]] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), action))

    def latency(self, longest: float = 0.04) -> float:
        """Mostly short, now and then long."""
        return self.random.random() * longest * (12 if self.random.random() < 0.05 else 1)

    def run(self, done: Callable[[], bool], horizon: float) -> None:
        """Until `done`; Violation when it has not come by `horizon`."""
        steps = 0
        while self._heap:
            steps += 1
            if steps % 8 == 0 and done():
                return
            time, _, action = heapq.heappop(self._heap)
            if time > horizon:
                raise Violation(f"not over after {horizon:g} s")
            self.now = time
            action()

    def note(self, kind: str, text: str = "") -> None:
        self.seen[kind] += 1
        self.trace.append(f"{self.now:8.3f} {kind} {text}")


class Pipe:
    """A FIFO with latency. `cut` drops what has not arrived."""

    def __init__(self, world: World, arrive: Callable[[Any], None], longest: float = 0.04) -> None:
        self._world, self._arrive, self._longest = world, arrive, longest
        self._last, self._open = 0.0, True

    def put(self, item: object) -> None:
        self._last = max(self._last, self._world.now + self._world.latency(self._longest))
        self._world.at(self._last - self._world.now, lambda: self._arrive(item) if self._open else None)

    def cut(self) -> None:
        self._open = False


@dataclass(eq=False)
class Write:
    """On the fabric. The bytes land once, whatever has become of the writer, unless it was cut off before."""

    source: Node
    rank: int
    remote: str
    pairs: RegionPairs
    code: int
    status: WriteStatus = field(default_factory=lambda: WriteStatus(WriteState.IN_FLIGHT))
    fail: bool = False


class SimAgent:
    """See agents.base.Agent: as much of it as the rank role uses."""

    def __init__(self, node: Node, rank: int) -> None:
        self.node, self.rank = node, rank
        self.name = f"{node.name}:{node.incarnation.hex()[:8]}:{rank}"
        self._open: set[Write] = set()

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        self.node.world.memory[self.name] = (self.node, self.rank)

    def descriptor(self) -> AgentDescriptor:
        return AgentDescriptor("sim", self.name, b"")

    def load_remote(self, remote: AgentDescriptor, regions: Sequence[RegisteredRegion]) -> None:
        pass

    def forget_remote(self, name: str) -> None:
        if any(write.remote == name for write in self._open):
            raise Violation(f"{name} is forgotten under an open write")

    def path(self, remote: str) -> str:
        return "sim"

    def submit(self, pairs: RegionPairs, remote: str) -> Write:
        world = self.node.world
        code = ctypes.c_uint64.from_address(int(pairs.src[0])).value
        write = Write(self.node, self.rank, remote, pairs, code, fail=world.random.random() < world.failing)
        self._open.add(write)
        world.writes.append(write)
        slow = world.random.random() < 0.15
        world.at(world.random.random() * (6.0 if slow else 0.1), lambda: self.node.land(write))
        world.note("post", f"{self.name} -> {remote}")
        return write

    def poll(self, handle: Write) -> WriteStatus:
        return handle.status

    def release(self, handle: Write) -> None:
        self._open.remove(handle)

    def close(self) -> None:
        pass


class SimRank:
    """A rank process with its two pipes to the hub."""

    def __init__(self, node: Node, number: int) -> None:
        self.node, self.number, self.alive = node, number, True
        world = node.world
        self.commands = Pipe(world, self._handle)
        self.events = Pipe(world, self._said)
        agent: Any = SimAgent(node, number)
        self.role = RankTransceiver(
            node.tables[number],
            number,
            Topology(tp_size=RANKS, tp_rank=number),
            agent,
            self._emit,
            lambda: world.now,
        )
        self._stepping = False

    def _emit(self, event: RankToHub) -> None:
        self.events.put(event)

    def _said(self, event: RankToHub) -> None:
        if self.node.alive:
            self.node.core.from_rank(self.number, event, self.node.world.now)

    def _handle(self, command: HubToRank) -> None:
        if not self.alive:
            return
        self.role.handle(command)
        self.step()

    def step(self) -> None:
        """Posts, polls, and comes again while anything is open."""
        if self.alive and not self._stepping:
            self._stepping = True
            self.node.world.at(0.025, self._poll)

    def _poll(self) -> None:
        self._stepping = False
        if self.alive and self.role.poll():
            self.step()


class Connection:
    """One Connect stream."""

    numbers = count(1)

    def __init__(self, generation: Node, peer: PeerId, context: Node) -> None:
        self.generation, self.peer, self.context = generation, peer, context
        self.number, world = next(self.numbers), generation.world
        self.there, self.back = Pipe(world, self._to_context), Pipe(world, self._to_generation)
        self.open = True
        context.streams[self.number] = self
        context.core.context.opened(self.number, world.now)

    def say_there(self, body: PeerBody) -> None:
        dst = self.generation.core.generation.speaks_to(self.peer)
        self.there.put(Envelope(self.generation.incarnation, dst, (body,)))

    def say_back(self, body: PeerBody) -> None:
        dst = self.context.core.context.speaks_to(self.number)
        self.back.put(Envelope(self.context.incarnation, dst, (body,)))

    def _to_context(self, envelope: Envelope) -> None:
        if self.context.alive:
            try:
                self.context.core.context.envelope(self.number, envelope, self.context.world.now)
            except ProtocolError as error:
                raise Violation(f"the context side was told nonsense: {error}") from error
            self.context.core.settle_lost(self.context.world.now)

    def _to_generation(self, envelope: Envelope) -> None:
        if self.generation.alive and self.generation.links.get(self.peer) is self:
            try:
                self.generation.core.generation.envelope(self.peer, envelope, self.generation.world.now)
            except ProtocolError as error:
                raise Violation(f"the generation side was told nonsense: {error}") from error

    def end(self) -> None:
        """Ends for both, each learns of it in its own time; what is on its way is lost."""
        if not self.open:
            return
        self.open = False
        self.there.cut()
        self.back.cut()
        world = self.generation.world
        for seen_by in (self._context_sees, self._generation_sees):
            # Now and then nothing tells one side that the other is gone.
            half_open = world.random.random() < 0.2
            world.at(world.random.random() * (3.0 if half_open else 0.4), seen_by)

    def _context_sees(self) -> None:
        self.context.streams.pop(self.number, None)
        if self.context.alive:
            self.context.core.context.closed(self.number, self.context.world.now)

    def _generation_sees(self) -> None:
        node = self.generation
        if node.links.get(self.peer) is self:
            node.links[self.peer] = None
            if node.alive:
                node.core.generation.closed(self.peer, node.world.now)
                node.world.at(node.world.random.random() * 0.3, lambda: node.connect(self.peer))


class Node:
    """One instance: hub core, ranks, scheduler role, and the pages of its memory."""

    def __init__(
        self, world: World, name: str, role: InstanceRole, pages: int, where: dict[str, Node], exited: Sequence[bytes]
    ) -> None:
        self.world, self.name, self.where = world, name, where
        self.incarnation = world.random.randbytes(16)
        self.alive = True
        life = world.lives[name]
        world.lives[name] += 1
        arenas = [arena(name, life, rank, pages) for rank in range(RANKS)]
        self.storage, self.tables = [one for one, _ in arenas], [table for _, table in arenas]
        # Who holds a page, as the scheduler sees it; the same pages on every rank.
        self.owner: list[RequestKey | None] = [None] * pages
        self.streams: dict[int, Connection] = {}
        self.links: dict[PeerId, Connection | None] = {}
        self.down: Pipe = Pipe(world, self._from_scheduler, 0.01)
        self.up: Pipe = Pipe(world, self._to_scheduler, 0.01)
        self.transceiver = SchedulerTransceiver(self, lambda: world.now)
        # The scheduler's loop takes a step; set by whoever schedules.
        self.wake: Callable[[], None] = lambda: None
        self.ranks = [SimRank(self, number) for number in range(RANKS)]
        infos: list[RankInfo] = []
        for rank in self.ranks:
            rank.role.start()
            infos.append(rank.role.info)
        local = InstanceInfo(name, self.incarnation, name, role, MODEL, tuple(infos), tuple(exited))
        self.core = HubCore(local, CONFIG, self, NO_TRACING)
        where[name] = self
        world.at(TICK_S, self._tick)

    # --- the scheduler's pages

    def take(self, key: RequestKey, number: int) -> list[int] | None:
        """Free pages for an attempt, None when there are not enough."""
        free = [page for page, owner in enumerate(self.owner) if owner is None]
        if len(free) < number:
            return None
        picked = self.world.random.sample(free, number)
        for page in picked:
            self.owner[page] = key
        return picked

    def give_back(self, key: RequestKey) -> None:
        """The scheduler frees an attempt: from now on anybody may use its pages."""
        codes = {code_of(key, rank) for rank in range(RANKS)}
        for write in self.world.writes:
            if write.code in codes and self in (write.source, self.world.memory[write.remote][0]):
                raise Violation(f"{self.name} frees the pages of {key} under a write")
        for page, owner in enumerate(self.owner):
            if owner == key:
                self.owner[page] = None

    def words(self, rank: int, page: int) -> list[int]:
        """K and V of a page on one rank."""
        at = GUARD + page * self.storage[rank].slot
        return self.storage[rank].memory[at : at + 16].view(np.uint64).tolist()

    def fill(self, key: RequestKey, pages: list[int]) -> None:
        """What the prefill would have computed."""
        for rank, storage in enumerate(self.storage):
            for page in pages:
                at = GUARD + page * storage.slot
                storage.memory[at : at + 16].view(np.uint64)[:] = code_of(key, rank)

    def land(self, write: Write) -> None:
        """Bytes arrive, if source and destination still are memory. Nobody may be surprised by them."""
        if write not in self.world.writes:
            return
        self.world.writes.remove(write)
        node, rank = self.world.memory[write.remote]
        if not node.alive:
            write.status = WriteStatus(WriteState.FAILED, "the peer is gone", peer_lost=True)
            return
        done = len(write.pairs) - 1 if write.fail else len(write.pairs)
        for src, dst, size in zip(*(column[:done].tolist() for column in _columns(write.pairs)), strict=True):
            if ctypes.c_uint64.from_address(src).value != write.code:
                raise Violation(f"{self.name} reused a source page under a write")
            ctypes.memmove(dst, src, size)
            storage = node.storage[rank]
            for page in range(
                (dst - storage.base) // storage.slot, (dst + size - 1 - storage.base) // storage.slot + 1
            ):
                holder = node.owner[page]
                if holder is None or code_of(holder, rank) != write.code:
                    raise Violation(f"a late write hit page {page} of {node.name}, which {holder} holds")
        failed = WriteStatus(WriteState.FAILED, "link error")
        write.status = failed if write.fail else WriteStatus(WriteState.DONE)

    # --- faults

    def kill_rank(self, number: int) -> None:
        """SIGKILL. What it posted may land until the fabric has drained; the parent reports a little later."""
        rank = self.ranks[number]
        if not rank.alive or not self.alive:
            return
        rank.alive = False
        self.world.at(self.world.random.random() * 0.1, lambda: self._report(number))
        self.world.at(CONFIG.drain_s * 0.999, lambda: self._drained(number))

    def _report(self, number: int) -> None:
        if self.alive:
            self.world.note("rank exited", f"{self.name}:{number}")
            self.core.rank_exited(number, "signal 9", self.world.now)
            self.core.settle_lost(self.world.now)

    def _drained(self, number: int) -> None:
        for write in [one for one in self.world.writes if one.source is self and one.rank == number]:
            self.world.writes.remove(write)

    def kill(self) -> None:
        """The hub dies and its ranks with it."""
        for number in range(RANKS):
            self.kill_rank(number)
        self.alive = False
        for connection in [*self.streams.values(), *filter(None, self.links.values())]:
            connection.end()

    # --- plumbing: core.Effects and SchedulerPort

    def send(self, message: SchedulerToHub) -> None:
        self.down.put(message)

    def _from_scheduler(self, message: SchedulerToHub) -> None:
        if self.alive:
            self.core.from_scheduler(message, self.world.now)

    def _to_scheduler(self, message: HubToScheduler) -> None:
        self.transceiver.deliver(message)
        self.world.at(self.world.random.random() * 0.05, self.wake)

    def _tick(self) -> None:
        if self.alive:
            self.core.tick(self.world.now)
            self.world.at(TICK_S, self._tick)

    def deliver(self, message: HubToScheduler) -> None:
        self.up.put(message)

    def to_rank(self, rank: int, message: HubToRank) -> None:
        if not self.ranks[rank].alive and self.world.random.random() < 0.5:
            raise ConnectionError("the rank is gone")
        self.ranks[rank].commands.put(message)

    def stream_say(self, stream: int, body: PeerBody) -> None:
        if stream in self.streams:
            self.streams[stream].say_back(body)

    def stream_end(self, stream: int, reason: EndReason, text: str) -> None:
        self.world.note(f"context ends stream: {reason.value}", text)
        if stream in self.streams:
            self.streams[stream].end()

    def link_say(self, peer: PeerId, body: PeerBody) -> None:
        connection = self.links.get(peer)
        if connection is not None:
            connection.say_there(body)

    def link_end(self, peer: PeerId, reason: EndReason, text: str) -> None:
        self.world.note(f"generation ends stream: {reason.value}", text)
        connection = self.links.get(peer)
        if connection is not None:
            connection.end()

    def link_start(self, address: PeerAddress) -> None:
        peer = (address.instance_id, address.incarnation)
        self.links[peer] = None
        self.world.at(self.world.latency(), lambda: self.connect(peer))

    def link_stop(self, peer: PeerId) -> None:
        connection = self.links.pop(peer, None)
        if connection is not None:
            connection.end()

    def pair(self, status: PairStatus) -> None:
        self.world.note(f"pair {status.state.name}", status.instance_id)

    def connect(self, peer: PeerId) -> None:
        """Opens a stream to whoever answers at the endpoint now."""
        if not self.alive or peer not in self.links or self.links[peer] is not None:
            return
        context = self.where[peer[0]]
        if not context.alive:
            self.world.at(self.world.random.random() * 0.3, lambda: self.connect(peer))
            return
        self.links[peer] = Connection(self, peer, context)
        self.core.generation.opened(peer, self.world.now)


def _columns(pairs: RegionPairs) -> tuple[Any, Any, Any]:
    return pairs.src, pairs.dst, pairs.lengths
