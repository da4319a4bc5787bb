"""An order becomes a write: direct, bounced, or some layer groups one way and some the other.

order ─▶ what every layer group moves ─▶ cost of either way ─▶ PiecedWrite beside BouncedWrite
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvtransfer import nvtx, packing
from kvtransfer.cost.book import Staged
from kvtransfer.cost.model import Shape, direct_s
from kvtransfer.cost.policies import Decision, StagingPolicy, decide
from kvtransfer.peer_plan import MANY_FRAGMENTS, PeerPlan
from kvtransfer.regions import RegionPairs
from kvtransfer.transceiver.bounced_write import BouncedWrite, Route
from kvtransfer.transceiver.layer_progress import ALL_LAYERS, LayerProgress
from kvtransfer.transceiver.layered_write import LayeredWrite, layer_slices
from kvtransfer.transceiver.orders import begins, block_lists, chunk_of
from kvtransfer.transceiver.parts import layered_parts, tapered_parts
from kvtransfer.transceiver.pieced_write import PiecedWrite

if TYPE_CHECKING:
    from kvtransfer.agents.base import Agent
    from kvtransfer.cost.book import CostBook
    from kvtransfer.packed import Packed
    from kvtransfer.pools import RegisteredRegion
    from kvtransfer.ports import WriteOrder
    from kvtransfer.rank_info import RankInfo
    from kvtransfer.transceiver.bouncing import Bouncing
    from kvtransfer.transfer import Transfer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Chosen:
    """A write that is ready to begin. `predicted`: seconds until it is over. `shape` of what goes one way; None when
    some goes either way, or the model is waited for: nothing is learnt then. `chunks`: bytes of one and how many at
    once, 0 when nothing goes through chunks."""

    write: PiecedWrite | BouncedWrite | LayeredWrite
    nbytes: int
    descriptors: int
    bounced: int
    path: str
    predicted: float
    why: str
    shape: Shape | None
    chunks: tuple[int, int] = (0, 0)

    def learn(self, book: CostBook, took: float) -> None:
        """It had the agent for itself, and was over after `took` seconds."""
        if self.shape is None:
            return
        if isinstance(self.write, BouncedWrite):
            stages = self.write.stages
            size, depth = self.chunks
            seen = Staged(took, stages.gather, stages.first, size, self.write.chunks, depth)
            book.staged(self.path, self.shape, seen)
        else:
            book.wrote(self.path, self.shape, took)


@dataclass(frozen=True, slots=True)
class Arenas:
    """What chunks to a peer go through. `host`: the peer's arena on the host, where its cache is not. `across`: that
    the caches lie in different kinds of memory, in words; otherwise empty."""

    send: RegisteredRegion
    receive: RegisteredRegion
    host: bool
    across: str


class Chooser:
    """Of one rank. Raises what planning raises: PlanError, AgentError."""

    def __init__(
        self,
        agent: Agent,
        rank: int,
        piece_bytes: int,
        bouncing: Bouncing,
        clock: Callable[[], float],
        layers: LayerProgress | None = None,
    ) -> None:
        self._agent, self._rank, self._piece_bytes, self._bouncing = agent, rank, piece_bytes, bouncing
        self._clock, self._layers = clock, layers or LayerProgress()
        self._sliced: WeakKeyDictionary[PeerPlan, tuple[tuple[int, PeerPlan], ...]] = WeakKeyDictionary()

    def choose(self, order: WriteOrder, plan: PeerPlan, remote: RankInfo, *, may_bounce: bool) -> Chosen:
        """The write of `order` to one rank."""
        with nvtx.span("kv.plan"):
            chosen = self._choose(order, plan, remote, may_bounce=may_bounce)
        log.debug("request %s to rank %d: %d bytes bounced, %s", order.key, plan.dst_rank, chosen.bounced, chosen.why)
        return chosen

    def _choose(self, order: WriteOrder, plan: PeerPlan, remote: RankInfo, *, may_bounce: bool) -> Chosen:
        lists = block_lists(order.sources, self._rank), block_lists(order.destinations, plan.dst_rank)
        firsts = begins(order.sources, self._rank), begins(order.destinations, plan.dst_rank)
        chunk = chunk_of(order)
        located = plan.locate(*lists, chunk, *firsts)
        whole, path = plan.moves(located), self._agent.path(remote.agent.name)
        blocks = sum(int((ids >= 0).sum()) for ids in lists[1].values())
        arenas, why = self._arenas(plan, remote, may_bounce=may_bounce)
        if arenas is not None and whole.nbytes:
            parts = [whole] if len(located) == 1 else [plan.moves([one]) for one in located]
            decided = [self._decide(path, [one], blocks, arenas) for one in parts]
            bounces = [one for one, how in zip(located, decided, strict=True) if how.bounce]
            why = decided[0].why
            packed = packing.pack_located(bounces, reads=True) if bounces else None
            if packed is not None and self._bouncing.policy.copier.can(packed):
                beside = [part for part, how in zip(parts, decided, strict=True) if not how.bounce]
                moved = [part for part, how in zip(parts, decided, strict=True) if how.bounce]
                decision = decided[0] if len(moved) == len(decided) == 1 else self._decide(path, moved, blocks, arenas)
                groups = tuple(group.dst.number for group, _ in bounces)
                return self._bounced(order, remote, path, arenas, packed, moved, beside, decision, groups)
            if packed is not None:
                why = "tokens are not made of whole bytes"
        if whole.nbytes and (across := _across(plan, remote)):
            log.warning("a write %s goes no fast way: %s", across, why)
        if order.step and not self._layers.reached(order.step, ALL_LAYERS):
            slices = [
                (end, part.resolve(*lists, chunk, src_begins=firsts[0], dst_begins=firsts[1]))
                for end, part in self._slices(plan)
            ]
            return self._layered(order, remote, path, slices, why)
        return self._direct(remote, path, whole, blocks, why)

    def _layered(
        self, order: WriteOrder, remote: RankInfo, path: str, parts: list[tuple[int, Transfer]], why: str
    ) -> Chosen:
        pairs = [(end, part.pairs()) for end, part in parts]
        writes = [(end, PiecedWrite(self._agent, remote.agent.name, one, self._piece_bytes)) for end, one in pairs]
        write = LayeredWrite(writes, partial(self._layers.reached, order.step))
        nbytes, count = sum(one.nbytes for _, one in pairs), sum(len(one) for _, one in pairs)
        # What it takes says more about the model than about the path: nothing is predicted or learnt.
        return Chosen(write, nbytes, count, 0, path, 0.0, f"layer by layer: {why}", None)

    def _arenas(self, plan: PeerPlan, remote: RankInfo, *, may_bounce: bool) -> tuple[Arenas | None, str]:
        """What chunks go through, or why nothing can."""
        mine, theirs = plan.tables[0].memory_kind, remote.page_table.memory_kind
        send, receive = self._bouncing.policy.send_for(mine, theirs), remote.arena_for(mine)
        where = "" if mine is theirs else " on the host"
        if send is None:
            why = f"this rank has no arena{where}"
        elif receive is None:
            why = f"rank {remote.rank} of the peer has no arena{where}"
        elif not may_bounce:
            why = "one of the two sides does not know this packing"
        elif send is self._bouncing.policy.host_send and (problem := self._bouncing.policy.lock_host()):
            why = problem
        else:
            return Arenas(send, receive, receive is remote.host_arena, _across(plan, remote)), ""
        return None, why

    def _direct(self, remote: RankInfo, path: str, whole: Transfer, blocks: int, why: str) -> Chosen:
        pairs = whole.pairs()
        shape = Shape(whole.nbytes, len(pairs), len(pairs), blocks)
        predicted = direct_s(self._bouncing.policy.book.cost(path), shape) if len(pairs) else 0.0
        if len(pairs) > MANY_FRAGMENTS:
            log.warning("transfer in very many fragments", extra={"fragments": len(pairs), "bytes": whole.nbytes})
        write = PiecedWrite(self._agent, remote.agent.name, pairs, self._piece_bytes)
        return Chosen(write, whole.nbytes, len(pairs), 0, path, predicted, f"direct: {why}", shape)

    def _bounced(
        self,
        order: WriteOrder,
        remote: RankInfo,
        path: str,
        arenas: Arenas,
        packed: Packed,
        moved: list[Transfer],
        beside: list[Transfer],
        decision: Decision,
        groups: tuple[int, ...],
    ) -> Chosen:
        bouncing, policy = self._bouncing, self._bouncing.policy
        peer = (order.instance_id, order.incarnation)
        pairs = _joined([one.pairs() for one in beside])
        direct = PiecedWrite(self._agent, remote.agent.name, pairs, self._piece_bytes) if len(pairs) else None
        window = order.tokens if order.window is None else order.window
        route = Route(
            order.key,
            order.receive,
            self._rank,
            remote.rank,
            remote.agent.name,
            arenas.send.base_address,
            arenas.receive.base_address,
            window,
            groups,
            arenas.host,
        )
        waits = not self._layers.reached(order.step, ALL_LAYERS)
        size = decision.chunk_bytes
        parts = layered_parts(packed, size) if waits else tapered_parts(packed.nbytes, size)
        write = BouncedWrite(
            self._agent,
            policy.copier,
            packed,
            route,
            parts,
            decision.depth,
            say=partial(bouncing.say, peer),
            room=bouncing.room(arenas.send.base_address, peer),
            number=bouncing.number,
            clock=self._clock,
            direct=direct,
            reached=partial(self._layers.reached, order.step),
        )
        why = f"{'layer by layer, ' if waits else ''}bounced: {decision.why}"
        count = len(parts) + len(pairs)
        fragments = sum(one.fragments for one in moved)
        shape = None if direct is not None or waits else Shape(packed.nbytes, fragments, fragments, 0)
        nbytes, predicted = packed.nbytes + pairs.nbytes, 0.0 if waits else decision.predicted
        how = (size, decision.depth)
        return Chosen(write, nbytes, count, packed.nbytes, path, predicted, why, shape, how)

    def _decide(self, path: str, parts: list[Transfer], blocks: int, arenas: Arenas) -> Decision:
        policy = self._bouncing.policy
        nbytes, fragments = sum(one.nbytes for one in parts), sum(one.fragments for one in parts)
        shape = Shape(nbytes, fragments, fragments, blocks)
        limits = policy.limits(arenas.send, arenas.receive)
        if arenas.across and policy.staging is not StagingPolicy.NEVER:
            decision = decide(StagingPolicy.ALWAYS, policy.book.cost(path), shape, limits)
            return replace(decision, why=f"{arenas.across}, so through host memory on both sides")
        return decide(policy.staging, policy.book.cost(path), shape, limits)

    def _slices(self, plan: PeerPlan) -> tuple[tuple[int, PeerPlan], ...]:
        slices = self._sliced.get(plan)
        if slices is None:
            slices = self._sliced[plan] = layer_slices(plan)
        return slices


def _across(plan: PeerPlan, remote: RankInfo) -> str:
    mine, theirs = plan.tables[0].memory_kind, remote.page_table.memory_kind
    return "" if mine is theirs else f"from a cache in {mine.name} to one in {theirs.name}"


def _joined(parts: list[RegionPairs]) -> RegionPairs:
    if not parts:
        return RegionPairs.empty()
    return RegionPairs(
        np.concatenate([one.src for one in parts]),
        np.concatenate([one.dst for one in parts]),
        np.concatenate([one.lengths for one in parts]),
    )
