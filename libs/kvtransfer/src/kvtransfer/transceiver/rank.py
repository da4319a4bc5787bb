"""The rank role: owns the agent's side of the hand-off on one thread. Orders in, notices out.

    LoadPeer   ─▶ compatible? plans, connection ─▶ PeerLoaded
    WriteOrder ─▶ queued ─▶ posted ─▶ over      ─▶ TransferNotice (one for each destination rank)
                    └ CancelWrite: NEVER_STARTED

A notice is a promise: after it this rank never touches the destination of that attempt again. So none is given for a
posted write before the agent says that the write is over, cancelled or not.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.agents.base import WriteState
from kvtransfer.compatibility import check_rank
from kvtransfer.errors import AgentError, PlanError
from kvtransfer.peer_plan import build_rank_plans, rank_digest
from kvtransfer.ports import (
    CancelWrite,
    ForgetPeer,
    HubToRank,
    Incompatibility,
    LoadPeer,
    PeerLoaded,
    RankReady,
    RankToHub,
    TransferNotice,
    TransferStats,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import RankInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtransfer.agents.base import Agent, WriteHandle
    from kvtransfer.page_table import PageTable
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import RankBlocks, RequestKey
    from kvtransfer.rank_info import InstanceInfo, Topology

log = logging.getLogger(__name__)

PeerId = tuple[str, bytes]


@dataclass(slots=True, eq=False)
class _Peer:
    info: InstanceInfo
    plans: dict[int, PeerPlan]
    # The agent said that the connection broke: the next LoadPeer makes it again.
    lost: bool = False
    # ForgetPeer came while a write was open.
    forgotten: bool = False


@dataclass(slots=True, eq=False)
class _Queued:
    order: WriteOrder
    dst_rank: int
    taken: float


@dataclass(slots=True, eq=False)
class _Open:
    order: WriteOrder
    peer: _Peer
    plan: PeerPlan
    handle: WriteHandle
    stats: TransferStats
    posted: float


class RankTransceiver:
    """One rank's writer. Not thread-safe: everything is called from the thread that owns the agent.

    `emit` takes events in order and must not wait. `clock` in seconds, monotonic.
    """

    def __init__(
        self,
        page_table: PageTable,
        rank: int,
        topology: Topology,
        agent: Agent,
        emit: Callable[[RankToHub], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._page_table, self._rank, self._topology = page_table, rank, topology
        self._agent, self._emit, self._clock = agent, emit, clock
        self._info: RankInfo | None = None
        self._peers: dict[PeerId, _Peer] = {}
        self._queue: deque[_Queued] = deque()
        self._open: list[_Open] = []

    @property
    def info(self) -> RankInfo:
        """Known after `start`. Raises AgentError before."""
        if self._info is None:
            raise AgentError("the rank has not started: nothing is registered yet")
        return self._info

    @property
    def open_writes(self) -> int:
        """Orders that are queued or posted, counted per destination rank."""
        return len(self._queue) + len(self._open)

    def start(self) -> None:
        """Registers the memory and announces the rank. Raises GeometryError, AgentError."""
        self._page_table.validate()
        self._agent.register(self._page_table.regions)
        self._info = RankInfo(self._rank, self._topology, self._page_table, self._agent.descriptor())
        self._emit(RankReady(self._info))

    def handle(self, command: HubToRank) -> None:
        """Takes one command. Only LoadPeer talks to the agent; writes are posted by `poll`."""
        match command:
            case LoadPeer(peer):
                self._load(peer)
            case ForgetPeer(instance_id, incarnation):
                self._forget((instance_id, incarnation))
            case WriteOrder():
                self._take(command)
            case CancelWrite(key):
                self._cancel(key)

    def poll(self) -> bool:
        """Posts at most one queued write, so that a cancel can still overtake the others, and looks at every open one.

        True while anything is queued or open. Raises AgentBroken when the agent has lost track of its writes.
        """
        if self._queue:
            self._post(self._queue.popleft())
        for write in tuple(self._open):
            self._look(write)
        return bool(self._queue or self._open)

    def close(self) -> None:
        """Ends the agent. Raises AgentError while writes are open."""
        self._agent.close()

    def _load(self, info: InstanceInfo) -> None:
        peer_id = (info.instance_id, info.incarnation)
        known = self._peers.get(peer_id)
        if known is not None and (known.lost or known.info.ranks != info.ranks):
            if any(write.peer is known for write in self._open):
                self._refuse(info, "agent", "a write of the old connection is open", "connect again when it is over")
                return
            self._drop(peer_id, known)
            known = None
        if known is None:
            problems = check_rank(self.info, info)
            if problems:
                self._emit(PeerLoaded(*peer_id, incompatibilities=tuple(problems)))
                return
            plans = {plan.dst_rank: plan for plan in build_rank_plans(self.info, info)}
            try:
                for rank in plans:
                    self._agent.load_remote(info.ranks[rank].agent, info.ranks[rank].page_table.regions)
            except AgentError as error:
                for rank in plans:
                    self._agent.forget_remote(info.ranks[rank].agent.name)
                self._refuse(info, "agent", str(error), "see that both hosts reach each other and connect again")
                return
            known = self._peers[peer_id] = _Peer(info, plans)
        known.forgotten = False
        self._emit(PeerLoaded(*peer_id, plan_digest=rank_digest(known.plans.values())))

    def _refuse(self, info: InstanceInfo, field: str, problem: str, remedy: str) -> None:
        reason = Incompatibility(f"ranks[{self.info.rank}].{field}", self._agent.name, problem, remedy)
        self._emit(PeerLoaded(info.instance_id, info.incarnation, incompatibilities=(reason,)))

    def _forget(self, peer_id: PeerId) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        peer.forgotten = True
        for queued in [one for one in self._queue if (one.order.instance_id, one.order.incarnation) == peer_id]:
            self._queue.remove(queued)
            self._never(queued.order, queued.dst_rank, "the peer was forgotten")
        if not any(write.peer is peer for write in self._open):
            self._drop(peer_id, peer)

    def _drop(self, peer_id: PeerId, peer: _Peer) -> None:
        del self._peers[peer_id]
        for rank in peer.plans:
            self._agent.forget_remote(peer.info.ranks[rank].agent.name)

    def _take(self, order: WriteOrder) -> None:
        same = [queued.order for queued in self._queue] + [write.order for write in self._open]
        if any(one.key == order.key and one.incarnation == order.incarnation for one in same):
            # Its notices will answer this one as well: a second write of the same bytes would gain nothing.
            log.warning("order repeated while it is open", extra={"request": str(order.key)})
            return
        now = self._clock()
        for dst_rank in sorted({blocks.rank for blocks in order.destinations}):
            self._queue.append(_Queued(order, dst_rank, now))

    def _cancel(self, key: RequestKey) -> None:
        for queued in [one for one in self._queue if one.order.key == key]:
            self._queue.remove(queued)
            self._never(queued.order, queued.dst_rank, "cancelled before it was posted")

    def _post(self, queued: _Queued) -> None:
        order, dst_rank = queued.order, queued.dst_rank
        peer = self._peers.get((order.instance_id, order.incarnation))
        if peer is None or peer.forgotten:
            self._never(order, dst_rank, f"instance {order.instance_id} of this incarnation is not loaded")
            return
        if dst_rank not in peer.plans:
            self._never(order, dst_rank, f"rank {self.info.rank} is not a writer of rank {dst_rank}")
            return
        plan, began = peer.plans[dst_rank], self._clock()
        agent_name = peer.info.ranks[dst_rank].agent.name
        try:
            mine, theirs = _lists(order.sources, self.info.rank), _lists(order.destinations, dst_rank)
            pairs = plan.instantiate(mine, theirs, order.tokens)
            planned = self._clock()
            path = self._agent.path(agent_name)
            handle = self._agent.submit(pairs, agent_name) if len(pairs) else None
        except (PlanError, AgentError) as error:
            self._never(order, dst_rank, str(error))
            return
        posted = self._clock()
        stats = TransferStats(
            bytes=pairs.nbytes,
            descriptors=len(pairs),
            path=path,
            queue=began - queued.taken,
            plan=planned - began,
            post=posted - planned,
        )
        if handle is None:
            self._notify(order, plan, WriterOutcome.DELIVERED, stats)
        else:
            self._open.append(_Open(order, peer, plan, handle, stats, planned))

    def _look(self, write: _Open) -> None:
        status = self._agent.poll(write.handle)
        if status.state is WriteState.IN_FLIGHT:
            return
        wire = self._clock() - write.posted
        self._open.remove(write)
        self._agent.release(write.handle)
        done = status.state is WriteState.DONE
        cost = write.stats
        stats = TransferStats(
            cost.bytes if done else 0, cost.descriptors, cost.path, cost.queue, cost.plan, cost.post, wire
        )
        outcome = WriterOutcome.DELIVERED if done else WriterOutcome.QUIESCED
        self._notify(write.order, write.plan, outcome, stats, status.reason)
        write.peer.lost |= status.peer_lost
        if write.peer.forgotten and not any(other.peer is write.peer for other in self._open):
            self._drop((write.order.instance_id, write.order.incarnation), write.peer)

    def _notify(
        self, order: WriteOrder, plan: PeerPlan, outcome: WriterOutcome, stats: TransferStats, reason: str = ""
    ) -> None:
        extents = plan.extents(order.tokens) if outcome is WriterOutcome.DELIVERED else ()
        self._emit(TransferNotice(order.key, plan.src_rank, plan.dst_rank, outcome, extents, reason, stats))

    def _never(self, order: WriteOrder, dst_rank: int, reason: str) -> None:
        outcome = WriterOutcome.NEVER_STARTED
        self._emit(TransferNotice(order.key, self.info.rank, dst_rank, outcome, reason=reason))


def _lists(blocks: tuple[RankBlocks, ...], rank: int) -> dict[int, NDArray[np.int32]]:
    """Block lists of one rank by layer group."""
    return {one.layer_group: one.blocks for one in blocks if one.rank == rank}
