"""A rank's part in bouncing, both ways: which transfers bounce and through which memory; scatters of what arrives.

order ─▶ decide ─▶ BouncedWrite | PiecedWrite          Grant ─▶ the write that waits for it
MeetSource ─▶ plans of the writers                     ScatterOrder ─▶ copy ─▶ Scattered
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvtransfer import nvtx, packing
from kvtransfer.bounce.credits import Credits
from kvtransfer.bounce_ports import Grant, MeetSource, PeerWord, PrepareScatter, Scattered, ScatterOrder
from kvtransfer.errors import PlanError
from kvtransfer.peer_plan import build_source_plans
from kvtransfer.transceiver.orders import begins, block_lists, chunk_within
from kvtransfer.transceiver.send_room import SendRoom

if TYPE_CHECKING:
    from kvtransfer.bounce.copying import Copy
    from kvtransfer.bounce.policy import BouncePolicy
    from kvtransfer.bounce_ports import BounceChunk, ChunkName, ChunkReady
    from kvtransfer.packed import Packed
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import RankBlocks, RankToHub, TokenRange
    from kvtransfer.transceiver.bounced_write import BouncedWrite

log = logging.getLogger(__name__)

PeerId = tuple[str, bytes]
# Packed ranges that are kept between the chunks of one transfer.
_KEPT = 64


class _Part(NamedTuple):
    """What chunks are packed alike: `name` is that of any of them."""

    name: ChunkName
    window: TokenRange
    layer_groups: tuple[int, ...]


@dataclass(slots=True)
class _Scatter:
    order: ScatterOrder
    copy: Copy
    began: float


class Bouncing:
    """Not thread-safe: called from the thread that owns the agent. `emit` must not wait."""

    def __init__(
        self, policy: BouncePolicy, rank: int, emit: Callable[[RankToHub], None], clock: Callable[[], float]
    ) -> None:
        self.policy, self._rank, self._emit, self._clock = policy, rank, emit, clock
        # By the address of an arena to send from.
        self._rooms: dict[int, Credits[PeerId, ChunkName]] = {
            one.base_address: Credits(one.size_bytes, policy.unit_bytes, policy.max_peers)
            for one in (policy.send, policy.host_send)
            if one is not None
        }
        self._count = itertools.count(1)
        self._writes: dict[ChunkName, BouncedWrite] = {}
        self._sources: dict[PeerId, Mapping[int, PeerPlan]] = {}
        self._met: dict[PeerId, MeetSource] = {}
        self._packed: OrderedDict[tuple[object, ...], Packed] = OrderedDict()
        self._scatters: list[_Scatter] = []

    @property
    def busy(self) -> bool:
        """True while anything is copied."""
        return bool(self._scatters)

    def handle(self, command: Grant | MeetSource | PrepareScatter | ScatterOrder) -> None:
        """Takes what the hub says about chunks, either way."""
        match command:
            case Grant():
                self.granted(command)
            case MeetSource():
                self.meet(command)
            case PrepareScatter():
                self.prepare(command)
            case ScatterOrder():
                self.scatter(command)

    # --- context side

    def connect(self, peer: PeerId, plans: Iterable[PeerPlan]) -> None:
        """Writes to the peer may come: it keeps room here, however long others wait for room at theirs."""
        for room in self._rooms.values():
            room.connect(peer)
        if self._rooms:
            self._warm(plans, gather=True)

    def disconnect(self, peer: PeerId) -> None:
        """There is no write to the peer, and none will come."""
        for room in self._rooms.values():
            room.disconnect(peer)

    def say(self, peer: PeerId, body: ChunkReady | BounceChunk) -> None:
        """How a write speaks to the peer."""
        self._emit(PeerWord(*peer, body))

    def number(self) -> int:
        """The next chunk's."""
        return next(self._count)

    def room(self, arena: int, peer: PeerId) -> SendRoom:
        """Of a peer in the send arena at this address."""
        return SendRoom(self._rooms[arena], peer, self._writes)

    def granted(self, grant: Grant) -> None:
        """Room at the peer."""
        write = self._writes.get(grant.name)
        if write is not None:
            write.granted(grant)

    def over(self, write: BouncedWrite) -> None:
        """A write is over."""
        for name in [name for name, one in self._writes.items() if one is write]:
            del self._writes[name]

    # --- generation side

    def meet(self, meet: MeetSource) -> None:
        """Plans of the peer's writers, once for each description of it."""
        peer = (meet.peer.instance_id, meet.peer.incarnation)
        if self._met.get(peer) == meet:
            return
        for other in [one for one in self._met if one[0] == peer[0]] + list(self._met)[: -2 * self.policy.max_peers]:
            # An earlier incarnation, or one that has not been heard of for long: its plans can be made again.
            self.forget(other)
        plans = build_source_plans(meet.peer, meet.own, self._rank)
        self._warm(plans, gather=False)
        self._met[peer], self._sources[peer] = meet, {plan.src_rank: plan for plan in plans}

    def forget(self, peer: PeerId) -> None:
        """The peer sends nothing any more."""
        self._met.pop(peer, None)
        self._sources.pop(peer, None)

    def prepare(self, order: PrepareScatter) -> None:
        """Plans what will be scattered. What does not fit is said when a chunk has come."""
        part = _Part(order.name, order.window, order.layer_groups)
        try:
            packed = self._packed_of(part, (order.instance_id, order.incarnation), order.tokens, order.destinations)
            self.policy.copier.prepare(packed)
        except PlanError as error:
            log.debug("chunks of request %s can not be prepared for: %s", order.name.key, error)

    def scatter(self, order: ScatterOrder) -> None:
        """Begins to copy a chunk into the cache; one that does not fit the plan is answered with the problem."""
        chunk = order.chunk
        arena = self.policy.host_receive if chunk.host else self.policy.receive
        try:
            part = _Part(chunk.name, chunk.window, chunk.layer_groups)
            packed = self._packed_of(part, (order.instance_id, order.incarnation), order.tokens, order.destinations)
            if chunk.host and (problem := self.policy.lock_host()):
                raise PlanError(problem)
            if arena is None or chunk.offset + chunk.end - chunk.begin > arena.size_bytes:
                raise PlanError(f"chunk at {chunk.offset} does not lie in the arena of rank {self._rank}")
            if chunk.end > packed.nbytes:
                raise PlanError(f"chunk ends at packed byte {chunk.end}, the plan at {packed.nbytes}")
        except PlanError as error:
            self._emit(Scattered(chunk.name, str(error)))
            return
        began = self._clock()
        with nvtx.span("kv.scatter"):
            copy = self.policy.copier.scatter(packed, chunk.begin, chunk.end, arena.base_address + chunk.offset)
        self._scatters.append(_Scatter(order, copy, began))

    def _packed_of(self, part: _Part, peer: PeerId, tokens: TokenRange, destinations: tuple[RankBlocks, ...]) -> Packed:
        name = part.name
        which = (name.key, name.receive, name.src_rank, part.window, part.layer_groups, peer)
        packed = self._packed.get(which)
        if packed is None:
            plan = self._sources.get(peer, {}).get(name.src_rank)
            if plan is None:
                raise PlanError(f"rank {name.src_rank} of instance {peer[0]} is not a known writer")
            lists, first = block_lists(destinations, self._rank), begins(destinations, self._rank)
            chunk, groups = chunk_within(part.window, tokens), frozenset(part.layer_groups)
            packed = packing.pack_destination(plan, lists, chunk, dst_begins=first, groups=groups)
            self._packed[which] = packed
            if len(self._packed) > _KEPT:
                self._packed.popitem(last=False)
        return packed

    # --- both

    def _warm(self, plans: Iterable[PeerPlan], *, gather: bool) -> None:
        """What the first copy of a plan would have to make first, and a request wait for."""
        for plan in plans:
            for runs in packing.places_of(plan, reads=gather):
                if runs.whole_bytes:
                    self.policy.copier.warm(runs, gather=gather)

    def poll(self) -> bool:
        """Places chunks for which there is room, looks at scatters. True while anything is copied."""
        for room in self._rooms.values():
            for given in room.give():
                write = self._writes.get(given.ticket)
                if write is None:
                    room.give_back(given.ticket)
                else:
                    write.place(given.ticket, given.offset, given.nbytes)
        for one in tuple(self._scatters):
            if one.copy.done():
                self._scatters.remove(one)
                self._emit(Scattered(one.order.chunk.name, seconds=one.copy.seconds(self._clock() - one.began)))
        return bool(self._scatters)
