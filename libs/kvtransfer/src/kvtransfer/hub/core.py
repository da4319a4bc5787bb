"""Everything a hub decides about hand-offs, without I/O: ledger, sessions and peer machines behind one set of events.

from_scheduler, from_rank, rank_exited, set_peers, streams opened/said/closed, tick  ─▶ HubCore ─▶ Effects
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtransfer.control.context import ContextControl
from kvtransfer.control.generation import GenerationControl, PairState, PairStatus, PeerAddress
from kvtransfer.ledger import Ledger, PageState
from kvtransfer.messages import (
    Cancel,
    Capability,
    FenceAnswer,
    FenceWriter,
    KvIntent,
    KvRequest,
    PeerBody,
    PeerView,
    Reconcile,
)
from kvtransfer.ports import (
    BindContext,
    CancelTransfer,
    Grant,
    PeerLoaded,
    PeerProbed,
    PeerWord,
    RankReady,
    ReceiveIntent,
    ReceiveOutcome,
    ReceiveRequest,
    Scattered,
    SendFirstTokens,
    SendOffer,
    SendOutcome,
    TransferFailure,
    TransferNotice,
    WriteOrder,
)
from kvtransfer.session.actions import Fence, KillRank, StopInstance, ToPeer, ToRank, ToScheduler
from kvtransfer.session.bindings import Bindings
from kvtransfer.session.bounce_receive import BounceReceive
from kvtransfer.session.bounce_transmit import BounceTransmit
from kvtransfer.session.bounced_receives import BouncedReceives
from kvtransfer.session.intents import Intents
from kvtransfer.session.transmit import TransmitSessions

if TYPE_CHECKING:
    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.control.negotiation import Dialect
    from kvtransfer.messages import SessionView
    from kvtransfer.ports import HubToRank, HubToScheduler, RankToHub, SchedulerToHub
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.session.actions import Action, EndReason, PeerId


class Effects(Protocol):
    """What a driver does for the core. Nothing waits and nothing calls back into the core.

    Streams of the context side are numbered by the driver; those of the generation side, links, are named by the peer.
    """

    def deliver(self, message: HubToScheduler) -> None:
        """Hand an outcome to the scheduler role."""
        ...

    def to_rank(self, rank: int, message: HubToRank) -> None:
        """Hand a command to a rank role. Raises ConnectionError when it can not be handed over any more."""
        ...

    def stream_say(self, stream: int, body: PeerBody) -> None:
        """Queue a message on a stream that a generation instance has opened."""
        ...

    def stream_end(self, stream: int, reason: EndReason, text: str) -> None:
        """End it after what was queued."""
        ...

    def link_say(self, peer: PeerId, body: PeerBody) -> None:
        """Queue a message on the stream to a context instance."""
        ...

    def link_end(self, peer: PeerId, reason: EndReason, text: str) -> None:
        """End it after what was queued; it is opened again."""
        ...

    def link_start(self, address: PeerAddress) -> None:
        """Keep a stream to the context instance open from now on."""
        ...

    def link_stop(self, peer: PeerId) -> None:
        """No longer."""
        ...

    def pair(self, status: PairStatus) -> None:
        """A pair has changed."""
        ...

    def fence(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        """Say this to whoever answers at the endpoint, by a call of its own; the answer goes to `fence_answered`."""
        ...

    def kill_rank(self, rank: int, reason: str) -> None:
        """SIGKILL a rank of this instance. Its exit report follows."""
        ...

    def stop_instance(self, reason: str) -> None:
        """End this instance and say why."""
        ...


@dataclass(frozen=True, slots=True)
class _Lost:
    rank: int
    order: WriteOrder


class HubCore:
    """One instance. All times are `now` in seconds, monotonic."""

    def __init__(
        self,
        local: InstanceInfo,
        config: TransferConfig,
        effects: Effects,
        tracing: Tracing,
        dialect: Dialect | None = None,
    ) -> None:
        self.local = local
        self._effects = effects
        self._lost: list[_Lost] = []
        self.ledger = Ledger.of(local.ranks)
        self.chunks_in = BounceReceive(local, config.bounce_unit_bytes, config.max_peers, self._emit)
        self.chunks_out = BounceTransmit(config.max_finished, self._emit)
        self.transmit = TransmitSessions(config, self._emit, tracing)
        self.receive = BouncedReceives(config, self.ledger, self._emit, tracing, self.chunks_in)
        self.intents = Intents(config, self._emit)
        self.bindings = Bindings(config.max_finished, self._emit)
        self.context = ContextControl(
            local,
            config,
            self.transmit,
            self.bindings,
            self.chunks_out,
            self._emit,
            effects.stream_say,
            effects.stream_end,
            dialect,
        )
        self.generation = GenerationControl(
            local,
            config,
            self.receive,
            self.intents,
            self.chunks_in,
            effects.link_say,
            effects.link_end,
            effects.link_start,
            self._link_stop,
            self._pair,
            dialect,
        )

    def from_scheduler(self, message: SchedulerToHub, now: float) -> None:
        """Raises TransferStateError for a key that is in use."""
        match message:
            case SendOffer():
                self.transmit.offer(message, now)
            case BindContext(key, dp_rank):
                self.transmit.prepare(key, now, dp_rank)
                self.bindings.scheduled(message)
            case SendFirstTokens():
                self.bindings.sampled(message)
            case ReceiveIntent():
                self.intents.intend(message, now)
            case ReceiveRequest():
                self.receive.receive(message, now)
            case CancelTransfer(key):
                self.transmit.withdraw(key, now)
                self.receive.withdraw(key, now)
                self.intents.withdraw(key)
        self.settle_lost(now)

    def from_rank(self, rank: int, message: RankToHub, now: float) -> None:
        """An event of a rank role. RankReady says what `local` holds already."""
        match message:
            case TransferNotice():
                self.transmit.notice(rank, message, now)
            case PeerLoaded():
                self.context.rank_loaded(rank, message, now)
            case PeerWord(instance_id, incarnation):
                ready = self.context.stream_of((instance_id, incarnation)) is not None
                self.chunks_out.rank_said(rank, message, ready=ready)
            case Scattered():
                for peer, word in self.chunks_in.scattered(rank, message):
                    self.receive.notice(peer, word, now)
            case RankReady() | PeerProbed():
                pass  # for the driver
        self.settle_lost(now)

    def rank_exited(self, rank: int, reason: str, now: float) -> None:
        """The parent's exit report, the only proof that a rank writes no more."""
        self.transmit.rank_exited(rank, reason, now)
        self.receive.rank_exited(rank, reason, now)
        for peer, word in self.chunks_in.rank_exited(rank, reason):
            self.receive.notice(peer, word, now)
        self.context.rank_exited(rank, reason, now)

    def goodbye(self, reason: str) -> None:
        """This instance stops. To be called after the exit of its ranks has been reported: then the peers know of every
        page, even of those that a message on its way speaks of, that nobody writes it any more."""
        self.context.goodbye(reason)
        self.generation.goodbye(reason)

    def fence_asked(self, incarnation: bytes, asker: PeerId, fence: FenceWriter) -> FenceAnswer:
        """A peer that has no stream suspects the writers of `incarnation`."""
        mine = incarnation == self.local.incarnation
        notices = self.transmit.fence(asker, fence.receives) if mine else ()
        exited = self.transmit.exited_ranks()
        return FenceAnswer(self.local.incarnation, self.local.exited_incarnations, exited, notices)

    def fence_answered(self, peer: PeerId, answer: FenceAnswer, now: float) -> None:
        """What the hub at the endpoint of a suspect can prove."""
        self.receive.peer_exited(peer[0], answer.exited_incarnations, now)
        if answer.incarnation != peer[1]:
            return
        self.receive.last_notices(peer, answer.notices, now)
        self.receive.peer_ranks_exited(peer, answer.exited_ranks, "as its hub says", now)

    def set_peers(self, addresses: Sequence[PeerAddress], now: float) -> None:
        """The complete list of context instances."""
        self.generation.set_peers(addresses, now)

    def tick(self, now: float) -> None:
        """Deadlines, drained exits, probes. To be called several times a second."""
        self.transmit.tick(now)
        self.receive.tick(now)
        self.intents.tick(now)
        self.context.tick(now)
        self.generation.tick(now)
        self.settle_lost(now)

    def settle_lost(self, now: float) -> None:
        """Orders that no rank took are never started. Called after every event that may order a write."""
        while self._lost:
            lost = self._lost.pop()
            self.transmit.order_lost(lost.rank, lost.order, now)

    @property
    def is_idle(self) -> bool:
        """True when no session is open and every destination page is free."""
        idle = self.transmit.is_idle and self.receive.is_idle and self.intents.is_idle and self.chunks_in.is_idle
        return idle and self.ledger.is_empty

    @property
    def in_doubt_pages(self) -> int:
        """Destination pages whose writers can not be asked."""
        return self.ledger.held()[PageState.IN_DOUBT]

    def views(self, now: float) -> list[SessionView]:
        """Open sessions of both sides."""
        return self.transmit.views(now) + self.receive.views(now)

    def peers(self) -> list[PeerView]:
        """Streams that may be used, of both sides, with what is in effect on them."""
        both = {**self.context.terms(), **self.generation.terms()}
        return [PeerView(*peer, one.protocol_version, one.capabilities, one.limits) for peer, one in both.items()]

    def _emit(self, action: Action) -> None:
        match action:
            case ToScheduler(ReceiveOutcome() as outcome):
                if not self.chunks_in.hold(outcome):
                    self._effects.deliver(outcome)
            case ToScheduler(message):
                if isinstance(message, SendOutcome):
                    self._leg_over(message)
                self._effects.deliver(message)
            case ToRank(rank, command):
                self._order(rank, command)
            case ToPeer(peer, body):
                self._to_peer(peer, body)
            case Fence(peer, endpoint, receives, reason):
                if self.generation.is_ready(peer):
                    self._effects.link_say(peer, FenceWriter(receives, reason))
                else:
                    self._effects.fence(peer, endpoint, FenceWriter(receives, reason))
            case KillRank(rank, reason):
                self._effects.kill_rank(rank, reason)
            case StopInstance(reason):
                self._effects.stop_instance(reason)

    def _pair(self, status: PairStatus) -> None:
        peer = (status.instance_id, status.incarnation)
        terms = self.generation.terms().get(peer) if status.state is PairState.READY else None
        if terms is not None and Capability.BOUNCE_PACKING_1 in terms.capabilities:
            self.chunks_in.meet(peer, terms.peer)
        self._effects.pair(status)

    def _link_stop(self, peer: PeerId) -> None:
        self.chunks_in.forget(peer)
        self._effects.link_stop(peer)

    def _leg_over(self, outcome: SendOutcome) -> None:
        self.chunks_out.over(outcome.key)
        if outcome.failure is TransferFailure.NONE:
            self.bindings.handed_off(outcome.key)
        else:
            self.bindings.over(outcome.key, outcome.reason or outcome.failure.name.lower().replace("_", " "))

    def _order(self, rank: int, command: HubToRank) -> None:
        try:
            self._effects.to_rank(rank, command)
        except ConnectionError:
            # The rank's exit report settles all else; an order that was never handed over must not wait for it.
            if isinstance(command, WriteOrder):
                self._lost.append(_Lost(rank, command))

    def _to_peer(self, peer: PeerId, body: PeerBody) -> None:
        if isinstance(body, KvRequest | Cancel | Reconcile | KvIntent | Grant):
            if isinstance(body, KvRequest):
                self.chunks_in.asked(peer, body)
            if self.generation.is_ready(peer):
                self._effects.link_say(peer, body)
            return
        stream = self.context.stream_of(peer)
        if stream is not None:
            self._effects.stream_say(stream, body)
