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
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtransfer.agents.base import WriteState
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.errors import AgentError, PlanError
from kvtransfer.ports import (
    CancelWrite,
    ForgetPeer,
    Grant,
    HubToRank,
    LoadPeer,
    MeetSource,
    PrepareScatter,
    ProbePeer,
    RankReady,
    RankToHub,
    ScatterOrder,
    TransferNotice,
    TransferStats,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import RankInfo
from kvtransfer.transceiver.bounced_write import BouncedWrite
from kvtransfer.transceiver.bouncing import Bouncing
from kvtransfer.transceiver.choosing import Chooser
from kvtransfer.transceiver.orders import begins, chunk_of, identity
from kvtransfer.transceiver.peers import Peers
from kvtransfer.transceiver.pieced_write import PIECE_BYTES
from kvtransfer.transceiver.probing import ProbePolicy, Probes
from kvtransfer.transceiver.rank_state import Open, PeerId, Queued

if TYPE_CHECKING:
    from kvtransfer.agents.base import Agent
    from kvtransfer.page_table import PageTable
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import RequestKey
    from kvtransfer.rank_info import Topology
    from kvtransfer.transceiver.choosing import Chosen
    from kvtransfer.transceiver.layer_progress import LayerProgress

log = logging.getLogger(__name__)


class RankTransceiver:
    """One rank's writer. Not thread-safe: everything is called from the thread that owns the agent.

    `emit` takes events in order and must not wait. `clock` in seconds, monotonic. Writes are posted in pieces of at
    most `piece_bytes`. `probing`: when the way to a peer is measured; without it never, and peers can not either.
    `bouncing`: arenas and who decides; without it everything is written directly. `layers`: of the model beside it.
    """

    def __init__(
        self,
        page_table: PageTable,
        rank: int,
        topology: Topology,
        agent: Agent,
        emit: Callable[[RankToHub], None],
        clock: Callable[[], float] = time.monotonic,
        piece_bytes: int = PIECE_BYTES,
        probing: ProbePolicy | None = None,
        bouncing: BouncePolicy | None = None,
        layers: LayerProgress | None = None,
    ) -> None:
        self._bouncing = Bouncing(bouncing or BouncePolicy(), rank, emit, clock)
        self._chooser = Chooser(agent, rank, piece_bytes, self._bouncing, clock, layers)
        self._probing = probing or ProbePolicy()
        self._probes = Probes(agent, rank, lambda: self.info, clock)
        self._page_table, self._rank, self._topology = page_table, rank, topology
        self._agent, self._emit, self._clock = agent, emit, clock
        self._info: RankInfo | None = None
        self._queue: deque[Queued] = deque()
        self._open: list[Open] = []
        self._peers = Peers(
            agent,
            self._probing,
            self._probes,
            self._bouncing,
            lambda: self.info,
            lambda peer: any(write.peer is peer for write in self._open),
            emit,
        )
        # What the next `poll` tells the cost book: writes that had the agent for themselves, and their seconds.
        self._lessons: list[tuple[Chosen, float]] = []
        # Whether the last `poll` has posted anything: what follows may be due at once.
        self.posted = False

    @property
    def info(self) -> RankInfo:
        """Known after `start`. Raises AgentError before."""
        if self._info is None:
            raise AgentError("the rank has not started: nothing is registered yet")
        return self._info

    @property
    def open_writes(self) -> int:
        """Orders that are queued or posted, counted per destination rank, and writes that measure."""
        return len(self._queue) + len(self._open) + self._probes.open_writes + self._bouncing.busy

    def start(self) -> None:
        """Registers the memory and announces the rank. Raises GeometryError, AgentError, AgentUnavailable."""
        self._page_table.validate()
        if self._probing.require_path:
            self._probing.check_possible(self._agent.capabilities)
        self._probing.check_memory(self._page_table.regions)
        policy = self._bouncing.policy
        self._agent.register((*self._page_table.regions, *self._probing.regions, *policy.regions))
        info = RankInfo(self._rank, self._topology, self._page_table, self._agent.descriptor())
        self._info = replace(info, **self._probing.announced, **policy.announced)
        self._emit(RankReady(self._info))

    def handle(self, command: HubToRank) -> None:
        """Takes one command. Only LoadPeer talks to the agent; writes are posted by `poll`."""
        match command:
            case LoadPeer():
                self._peers.load(command)
            case ForgetPeer(instance_id, incarnation):
                self._forget((instance_id, incarnation))
            case WriteOrder():
                self._take(command)
            case CancelWrite(key, receive):
                self._cancel(key, receive)
            case ProbePeer():
                self._peers.probe(command)
            case Grant() | MeetSource() | PrepareScatter() | ScatterOrder():
                self._bouncing.handle(command)

    def poll(self) -> bool:
        """Posts at most one piece of one write, so that a cancel can still overtake the others, and looks at every open
        one.

        True while anything is queued or open. Raises AgentBroken when the agent has lost track of its writes.
        """
        lessons, self._lessons = self._lessons, []
        for chosen, took in lessons:
            chosen.learn(self._bouncing.policy.book, took)
        begun = next((one for one in self._open if one.write.can_post), None)
        self.posted = begun is not None or bool(self._queue)
        if begun is not None:
            self._post_more(begun)
        elif self._queue:
            self._post(self._queue.popleft())
        for write in tuple(self._open):
            self._look(write)
            self.posted |= isinstance(write.write, BouncedWrite) and write.write.moved
        probing, copying = self._probes.poll(), self._bouncing.poll()
        self._peers.sweep()
        return bool(self._queue or self._open or self._lessons) or probing or copying

    def close(self) -> None:
        """Ends the agent. Raises AgentError while writes are open."""
        self._agent.close()

    def _forget(self, peer_id: PeerId) -> None:
        for queued in [one for one in self._queue if (one.order.instance_id, one.order.incarnation) == peer_id]:
            self._queue.remove(queued)
            self._never(queued.order, queued.dst_rank, "the peer was forgotten")
        self._peers.forget(peer_id)

    def _take(self, order: WriteOrder) -> None:
        same = [queued.order for queued in self._queue] + [write.order for write in self._open]
        if any(identity(one) == identity(order) for one in same):
            # Its notices will answer this one as well: a second write of the same bytes would gain nothing.
            log.warning("order repeated while it is open", extra={"request": str(order.key)})
            return
        now = self._clock()
        for dst_rank in sorted({blocks.rank for blocks in order.destinations}):
            self._queue.append(Queued(order, dst_rank, now))

    def _cancel(self, key: RequestKey, receive: int) -> None:
        for queued in [one for one in self._queue if one.order.key == key and one.order.receive == receive]:
            self._queue.remove(queued)
            self._never(queued.order, queued.dst_rank, "cancelled before it was posted")
        for one in self._open:
            if one.order.key == key and one.order.receive == receive:
                one.write.cancel("cancelled while it was posted piece by piece")

    def _post(self, queued: Queued) -> None:
        order, dst_rank = queued.order, queued.dst_rank
        peer = self._peers.find((order.instance_id, order.incarnation))
        if peer is None:
            self._never(order, dst_rank, f"instance {order.instance_id} of this incarnation is not loaded")
            return
        if dst_rank not in peer.plans:
            self._never(order, dst_rank, f"rank {self.info.rank} is not a writer of rank {dst_rank}")
            return
        plan, began = peer.plans[dst_rank], self._clock()
        try:
            chosen = self._chooser.choose(order, plan, peer.info.ranks[dst_rank], may_bounce=peer.bounce)
            planned = self._clock()
            if chosen.write.can_post:
                chosen.write.post()
        except (PlanError, AgentError) as error:
            self._never(order, dst_rank, str(error))
            return
        stats = TransferStats(
            bytes=chosen.nbytes,
            descriptors=chosen.descriptors,
            path=chosen.path,
            queue=began - queued.taken,
            plan=planned - began,
            post=self._clock() - planned,
            bounced=chosen.bounced,
            predicted=chosen.predicted,
            why=chosen.why,
        )
        if chosen.nbytes:
            alone = not self._open and not self._queue
            self._open.append(Open(order, peer, plan, chosen, stats, planned, alone))
        else:
            self._notify(order, plan, WriterOutcome.DELIVERED, stats)

    def _post_more(self, one: Open) -> None:
        began = self._clock()
        try:
            one.write.post()
        except AgentError as error:
            log.warning("a piece of request %s could not be posted: %s", one.order.key, error)
        one.stats = one.stats._replace(post=one.stats.post + self._clock() - began)

    def _look(self, write: Open) -> None:
        status = write.write.look()
        if status.state is WriteState.IN_FLIGHT:
            return
        wire = self._clock() - write.posted
        self._open.remove(write)
        done, chunks = status.state is WriteState.DONE, 0
        stats = write.stats._replace(bytes=write.stats.bytes if done else 0, wire=wire)
        if isinstance(write.write, BouncedWrite):
            self._bouncing.over(write.write)
            chunks, took = write.write.chunks, write.write.stages
            stats = stats._replace(credit=took.credit, gather=took.gather, post=stats.post + took.post)
        if done and write.alone and not self._open and not self._queue:
            # Not now: the peer waits for the word about this one.
            self._lessons.append((write.chosen, wire))
        outcome = WriterOutcome.DELIVERED if done else WriterOutcome.QUIESCED
        self._notify(write.order, write.plan, outcome, stats, status.reason, chunks)
        write.peer.lost |= status.peer_lost

    def _notify(
        self,
        order: WriteOrder,
        plan: PeerPlan,
        outcome: WriterOutcome,
        stats: TransferStats,
        reason: str = "",
        chunks: int = 0,
    ) -> None:
        wanted, who = begins(order.destinations, plan.dst_rank), (plan.src_rank, plan.dst_rank)
        extents = plan.extents(chunk_of(order), wanted) if outcome is WriterOutcome.DELIVERED else ()
        said = TransferNotice(order.key, *who, outcome, extents, reason, stats, receive=order.receive, chunks=chunks)
        self._emit(said)

    def _never(self, order: WriteOrder, dst_rank: int, reason: str) -> None:
        who, outcome = (self.info.rank, dst_rank), WriterOutcome.NEVER_STARTED
        self._emit(TransferNotice(order.key, *who, outcome, reason=reason, receive=order.receive))
