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
from functools import partial
from typing import TYPE_CHECKING

from kvtransfer.agents.base import WriteState
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.compatibility import check_rank
from kvtransfer.errors import AgentError, PlanError
from kvtransfer.peer_plan import build_rank_plans, rank_digest
from kvtransfer.ports import (
    CancelWrite,
    ForgetPeer,
    Grant,
    HubToRank,
    Incompatibility,
    LoadPeer,
    MeetSource,
    PairProbe,
    PeerLoaded,
    PeerProbed,
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
from kvtransfer.transceiver.pieced_write import PIECE_BYTES
from kvtransfer.transceiver.probing import SMALL_BYTES, ProbePolicy, Probes
from kvtransfer.transceiver.rank_state import Open, Peer, PeerId, Queued

if TYPE_CHECKING:
    from kvtransfer.agents.base import Agent
    from kvtransfer.page_table import PageTable
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import RequestKey
    from kvtransfer.rank_info import InstanceInfo, Topology
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
        self._peers: dict[PeerId, Peer] = {}
        self._queue: deque[Queued] = deque()
        self._open: list[Open] = []
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
                self._load(command)
            case ForgetPeer(instance_id, incarnation):
                self._forget((instance_id, incarnation))
            case WriteOrder():
                self._take(command)
            case CancelWrite(key, receive):
                self._cancel(key, receive)
            case ProbePeer():
                self._probe(command)
            case Grant():
                self._bouncing.granted(command)
            case MeetSource():
                self._bouncing.meet(command)
            case ScatterOrder():
                self._bouncing.scatter(command)

    def poll(self) -> bool:
        """Posts at most one piece of one write, so that a cancel can still overtake the others, and looks at every open
        one.

        True while anything is queued or open. Raises AgentBroken when the agent has lost track of its writes.
        """
        begun = next((one for one in self._open if one.write.can_post), None)
        self.posted = begun is not None or bool(self._queue)
        if begun is not None:
            self._post_more(begun)
        elif self._queue:
            self._post(self._queue.popleft())
        for write in tuple(self._open):
            self._look(write)
        probing, copying = self._probes.poll(), self._bouncing.poll()
        for peer_id, peer in [one for one in self._peers.items() if one[1].forgotten]:
            if not self._in_use(peer_id, peer):
                self._drop(peer_id, peer)
        return bool(self._queue or self._open) or probing or copying

    def close(self) -> None:
        """Ends the agent. Raises AgentError while writes are open."""
        self._agent.close()

    def _load(self, command: LoadPeer) -> None:
        info, ranks = command.peer, command.ranks
        peer_id = (info.instance_id, info.incarnation)
        known = self._peers.get(peer_id)
        if known is not None and (known.lost or known.info.ranks != info.ranks):
            if self._in_use(peer_id, known):
                self._refuse(info, "agent", "a write of the old connection is open", "connect again", later=True)
                return
            self._drop(peer_id, known)
            known = None
        if known is None:
            problems = check_rank(self.info, info, ranks)
            if problems:
                self._emit(PeerLoaded(*peer_id, incompatibilities=tuple(problems)))
                return
            plans = {plan.dst_rank: plan for plan in build_rank_plans(self.info, info, ranks)}
            try:
                for rank in plans:
                    self._agent.load_remote(info.ranks[rank].agent, info.ranks[rank].regions)
            except AgentError as error:
                for rank in plans:
                    self._agent.forget_remote(info.ranks[rank].agent.name)
                self._refuse(info, "agent", str(error), "see that both hosts reach each other and connect again")
                return
            known = self._peers[peer_id] = Peer(info, plans)
        known.forgotten, known.bounce, known.require_path = False, command.bounce, command.require_path
        if known.plans and (self._probing.measures or known.require_path):
            self._measure(peer_id, known, 0, partial(self._measured, peer_id, known))
        elif command.bounce and known.plans and self._probing.scratch is not None:
            # Also the first write to a peer, which takes a hundred times longer than the next one.
            paths = {self._agent.path(info.ranks[rank].agent.name) for rank in known.plans}
            new = not all(self._bouncing.policy.book.knows(path) for path in paths)
            self._measure(peer_id, known, 0 if new else SMALL_BYTES, partial(self._learnt, peer_id, known, new))
        else:
            self._emit(PeerLoaded(*peer_id, plan_digest=rank_digest(known.plans.values())))

    def _measure(self, peer_id: PeerId, peer: Peer, nbytes: int, done: Callable[[tuple[PairProbe, ...]], None]) -> None:
        self._probes.begin(peer_id, [peer.info.ranks[rank] for rank in sorted(peer.plans)], nbytes, done)

    def _learnt(self, peer_id: PeerId, peer: Peer, new: bool, found: tuple[PairProbe, ...]) -> None:
        """Costs of a path were measured, or a known one was warmed up."""
        for one in found if new else ():
            self._bouncing.policy.book.probed(one)
        self._emit(PeerLoaded(*peer_id, plan_digest=rank_digest(peer.plans.values())))

    def _measured(self, peer_id: PeerId, peer: Peer, found: tuple[PairProbe, ...]) -> None:
        """The pair has been measured before its first use."""
        for one in found:
            self._bouncing.policy.book.probed(one)
            log.info("way to rank %d of %s: %s", one.dst_rank, peer_id[0], one.problem or one.path)
        against = tuple(reason for one in found for reason in self._probing.refuse(one, peer.require_path))
        peer.lost |= bool(against)
        digest = b"" if against else rank_digest(peer.plans.values())
        self._emit(PeerLoaded(*peer_id, incompatibilities=against, plan_digest=digest, probes=found))

    def _probe(self, command: ProbePeer) -> None:
        peer_id = (command.instance_id, command.incarnation)
        peer = self._peers.get(peer_id)
        if peer is None or peer.forgotten:
            self._emit(PeerProbed(command.number, (PairProbe(self.info.rank, 0, problem="the peer is not loaded"),)))
        else:
            self._measure(peer_id, peer, command.nbytes, lambda found: self._emit(PeerProbed(command.number, found)))

    def _in_use(self, peer_id: PeerId, peer: Peer) -> bool:
        return any(write.peer is peer for write in self._open) or self._probes.touches(peer_id)

    def _refuse(self, info: InstanceInfo, field: str, problem: str, remedy: str, *, later: bool = False) -> None:
        reason = Incompatibility(f"ranks[{self.info.rank}].{field}", self._agent.name, problem, remedy)
        self._emit(PeerLoaded(info.instance_id, info.incarnation, incompatibilities=(reason,), later=later))

    def _forget(self, peer_id: PeerId) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        peer.forgotten = True
        for queued in [one for one in self._queue if (one.order.instance_id, one.order.incarnation) == peer_id]:
            self._queue.remove(queued)
            self._never(queued.order, queued.dst_rank, "the peer was forgotten")
        if not self._in_use(peer_id, peer):
            self._drop(peer_id, peer)

    def _drop(self, peer_id: PeerId, peer: Peer) -> None:
        del self._peers[peer_id]
        for rank in peer.plans:
            self._agent.forget_remote(peer.info.ranks[rank].agent.name)

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
        peer = self._peers.get((order.instance_id, order.incarnation))
        if peer is None or peer.forgotten:
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
            write.chosen.learn(self._bouncing.policy.book, wire)
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
        self._emit(
            TransferNotice(order.key, *who, outcome, extents, reason, stats, receive=order.receive, chunks=chunks)
        )

    def _never(self, order: WriteOrder, dst_rank: int, reason: str) -> None:
        who, outcome = (self.info.rank, dst_rank), WriterOutcome.NEVER_STARTED
        self._emit(TransferNotice(order.key, *who, outcome, reason=reason, receive=order.receive))
