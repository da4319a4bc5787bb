"""Peers of a rank: their plans, the agent's way to them, what that way costs; loaded, measured and forgotten.

LoadPeer ─▶ compatible? plans, connection ─▶ measured, or warmed up ─▶ PeerLoaded
ForgetPeer ─▶ forgotten ── no write is open ─▶ gone
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from kvtransfer.compatibility import check_rank
from kvtransfer.errors import AgentError, PlanError
from kvtransfer.explain import planned_transfer
from kvtransfer.peer_plan import build_rank_plans, rank_digest
from kvtransfer.ports import (
    Incompatibility,
    LoadPeer,
    PairProbe,
    PeerLoaded,
    PeerProbed,
    ProbePeer,
    RankToHub,
    TokenRange,
)
from kvtransfer.transceiver.probing import SMALL_BYTES, ProbePolicy, Probes
from kvtransfer.transceiver.rank_state import Peer, PeerId
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from kvtransfer.agents.base import Agent
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.rank_info import InstanceInfo, RankInfo
    from kvtransfer.transceiver.bouncing import Bouncing

log = logging.getLogger(__name__)


class Peers:
    """Not thread-safe: called from the thread that owns the agent. `info`: of this rank, once it has started.
    `writes_to(peer)`: a write to it is open. `emit` must not wait."""

    def __init__(
        self,
        agent: Agent,
        probing: ProbePolicy,
        probes: Probes,
        bouncing: Bouncing,
        info: Callable[[], RankInfo],
        writes_to: Callable[[Peer], bool],
        emit: Callable[[RankToHub], None],
    ) -> None:
        self._agent, self._probing, self._probes, self._bouncing = agent, probing, probes, bouncing
        self._info, self._writes_to, self._emit = info, writes_to, emit
        self._peers: dict[PeerId, Peer] = {}

    def find(self, peer_id: PeerId) -> Peer | None:
        """A peer that may be written to."""
        peer = self._peers.get(peer_id)
        return None if peer is None or peer.forgotten else peer

    def load(self, command: LoadPeer) -> None:
        """Answered by PeerLoaded, now or when the way has been measured."""
        peer_id = (command.peer.instance_id, command.peer.incarnation)
        known = self._peers.get(peer_id)
        if known is not None and (known.lost or known.info.ranks != command.peer.ranks):
            if self._in_use(peer_id, known):
                problem = "a write of the old connection is open"
                self._refuse(command.peer, "agent", problem, "connect again", later=True)
                return
            self._drop(peer_id, known)
            known = None
        known = known or self._made(command)
        if known is None:
            return
        known.forgotten, known.bounce, known.require_path = False, command.bounce, command.require_path
        if command.bounce and known.plans:
            self._bouncing.connect(peer_id, known.plans.values())
        if known.plans and (self._probing.measures or known.require_path):
            self._measure(peer_id, known, 0, partial(self._measured, peer_id, known))
        elif command.bounce and known.plans and self._probing.scratch is not None:
            # Also the first write to a peer, which takes a hundred times longer than the next one.
            paths = {self._agent.path(known.info.ranks[rank].agent.name) for rank in known.plans}
            new = not all(self._bouncing.policy.book.knows(path) for path in paths)
            self._measure(peer_id, known, 0 if new else SMALL_BYTES, partial(self._learnt, peer_id, known, new))
        else:
            self._emit(PeerLoaded(*peer_id, plan_digest=rank_digest(known.plans.values())))

    def probe(self, command: ProbePeer) -> None:
        """Answered by PeerProbed."""
        peer_id = (command.instance_id, command.incarnation)
        peer = self.find(peer_id)
        if peer is None:
            problem = PairProbe(self._info().rank, 0, problem="the peer is not loaded")
            self._emit(PeerProbed(command.number, (problem,)))
        else:
            self._measure(peer_id, peer, command.nbytes, lambda found: self._emit(PeerProbed(command.number, found)))

    def forget(self, peer_id: PeerId) -> None:
        """Nothing new is written to it; it is gone when nothing is open."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            peer.forgotten = True
            self.sweep()

    def sweep(self) -> None:
        """Forgotten peers to which nothing is written any more are gone."""
        for peer_id, peer in [one for one in self._peers.items() if one[1].forgotten]:
            if not self._in_use(peer_id, peer):
                self._drop(peer_id, peer)

    def _made(self, command: LoadPeer) -> Peer | None:
        """A peer that was not known; None when it is refused."""
        info, ranks = command.peer, command.ranks
        peer_id = (info.instance_id, info.incarnation)
        problems = check_rank(self._info(), info, ranks)
        if problems:
            self._emit(PeerLoaded(*peer_id, incompatibilities=tuple(problems)))
            return None
        plans = {plan.dst_rank: plan for plan in build_rank_plans(self._info(), info, ranks)}
        _rehearse(plans.values())
        try:
            for rank in plans:
                self._agent.load_remote(info.ranks[rank].agent, info.ranks[rank].regions)
        except AgentError as error:
            for rank in plans:
                self._agent.forget_remote(info.ranks[rank].agent.name)
            self._refuse(info, "agent", str(error), "see that both hosts reach each other and connect again")
            return None
        peer = self._peers[peer_id] = Peer(info, plans)
        return peer

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

    def _in_use(self, peer_id: PeerId, peer: Peer) -> bool:
        return self._writes_to(peer) or self._probes.touches(peer_id)

    def _refuse(self, info: InstanceInfo, field: str, problem: str, remedy: str, *, later: bool = False) -> None:
        reason = Incompatibility(f"ranks[{self._info().rank}].{field}", self._agent.name, problem, remedy)
        self._emit(PeerLoaded(info.instance_id, info.incarnation, incompatibilities=(reason,), later=later))

    def _drop(self, peer_id: PeerId, peer: Peer) -> None:
        del self._peers[peer_id]
        self._bouncing.disconnect(peer_id)
        for rank in peer.plans:
            self._agent.forget_remote(peer.info.ranks[rank].agent.name)


def _rehearse(plans: Iterable[PeerPlan]) -> None:
    """Plans a token of each: what is made on first use is not made by the first request."""
    for plan in plans:
        try:
            _ = planned_transfer(plan, Chunk.of(TokenRange(0, 1))).nbytes
        except PlanError as error:
            # A request may have what this one lacks, and is told otherwise.
            log.debug("a token to rank %d can not be planned: %s", plan.dst_rank, error)
