"""A rank's part in bouncing, both ways: which transfers bounce and through which memory; scatters of what arrives.

order ─▶ decide ─▶ BouncedWrite | PiecedWrite          Grant ─▶ the write that waits for it
MeetSource ─▶ plans of the writers                     ScatterOrder ─▶ copy ─▶ Scattered
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer import nvtx, packing
from kvtransfer.bounce.credits import Credits
from kvtransfer.bounce_ports import Grant, MeetSource, PeerWord, Scattered, ScatterOrder
from kvtransfer.errors import PlanError
from kvtransfer.peer_plan import build_source_plans
from kvtransfer.transceiver.orders import begins, block_lists, chunk_within

if TYPE_CHECKING:
    from kvtransfer.bounce.copying import Copy
    from kvtransfer.bounce.policy import BouncePolicy
    from kvtransfer.bounce_ports import BounceChunk, ChunkName, ChunkReady
    from kvtransfer.packed import Packed
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import RankToHub
    from kvtransfer.transceiver.bounced_write import BouncedWrite

log = logging.getLogger(__name__)

PeerId = tuple[str, bytes]
# Packed ranges that are kept between the chunks of one transfer.
_KEPT = 64


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

    # --- context side

    def say(self, peer: PeerId, write: BouncedWrite) -> Callable[[ChunkReady | BounceChunk], None]:
        """How `write` speaks to the peer; what it asks for finds its way back to it."""

        def tell(body: ChunkReady | BounceChunk) -> None:
            self._writes[body.name] = write
            self._emit(PeerWord(*peer, body))

        return tell

    def number(self) -> int:
        """The next chunk's."""
        return next(self._count)

    def ask_room(self, arena: int, peer: PeerId, name: ChunkName, nbytes: int) -> None:
        """Room in the send arena at this address, answered by `BouncedWrite.place`."""
        self._rooms[arena].ask(peer, name, nbytes)

    def free_room(self, name: ChunkName) -> None:
        """The chunk is not needed any more, or not waited for."""
        for room in self._rooms.values():
            room.drop(name)
            room.give_back(name)

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
        self._met[peer], self._sources[peer] = meet, {plan.src_rank: plan for plan in plans}

    def forget(self, peer: PeerId) -> None:
        """The peer sends nothing any more."""
        self._met.pop(peer, None)
        self._sources.pop(peer, None)

    def scatter(self, order: ScatterOrder) -> None:
        """Begins to copy a chunk into the cache; one that does not fit the plan is answered with the problem."""
        chunk = order.chunk
        arena = self.policy.host_receive if chunk.host else self.policy.receive
        try:
            packed = self._packed_of(order)
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

    def _packed_of(self, order: ScatterOrder) -> Packed:
        name, peer = order.chunk.name, (order.instance_id, order.incarnation)
        which = (name.key, name.receive, name.src_rank, order.chunk.window, order.chunk.layer_groups, peer)
        packed = self._packed.get(which)
        if packed is None:
            plan = self._sources.get(peer, {}).get(name.src_rank)
            if plan is None:
                raise PlanError(f"rank {name.src_rank} of instance {peer[0]} is not a known writer")
            lists, first = block_lists(order.destinations, self._rank), begins(order.destinations, self._rank)
            part = chunk_within(order.chunk.window, order.tokens)
            groups = frozenset(order.chunk.layer_groups)
            packed = packing.pack_destination(plan, lists, part, dst_begins=first, groups=groups)
            self._packed[which] = packed
            if len(self._packed) > _KEPT:
                self._packed.popitem(last=False)
        return packed

    # --- both

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
                self._emit(Scattered(one.order.chunk.name, seconds=self._clock() - one.began))
        return bool(self._scatters)
