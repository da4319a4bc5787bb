"""The generation hub's side of its links: one per context instance that the coordinator announces.

known ─ stream opened, Hello ─▶ GREETING ── Welcome fits ─▶ READY ── broken, silent ─▶ DOWN ─ opened again ─▶ …
                                   │ Reject, or Welcome does not fit
                                   └─────────────────▶ DOWN, the pair is INCOMPATIBLE until a Welcome fits
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvtransfer.bounce_ports import BounceChunk, ChunkReady
from kvtransfer.control.liveness import Liveness, Probe
from kvtransfer.control.negotiation import Dialect, Terms, check_welcome, limits_of, make_hello, swapped
from kvtransfer.control.pairs import PairState as PairState
from kvtransfer.control.pairs import PairStatus as PairStatus
from kvtransfer.control.pairs import PeerAddress as PeerAddress
from kvtransfer.control.pairs import choose
from kvtransfer.errors import ProtocolError
from kvtransfer.messages import (
    Bind,
    Capability,
    Envelope,
    ExitReport,
    FirstTokens,
    Goodbye,
    Hello,
    NotBound,
    PeerBody,
    Ping,
    Pong,
    ReconcileReply,
    Reject,
    Welcome,
)
from kvtransfer.ports import Incompatibility, TransferNotice
from kvtransfer.session.actions import EndReason, PeerId
from kvtransfer.session.holders import ReceivePeer
from kvtransfer.session.receive import ReceiveSessions

if TYPE_CHECKING:
    from kvtransfer.config import TransferConfig
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.session.bounce_receive import BounceReceive
    from kvtransfer.session.intents import Intents

log = logging.getLogger(__name__)


class LinkState(Enum):
    """Where the stream of a link is."""

    DOWN = auto()
    GREETING = auto()
    READY = auto()


@dataclass(slots=True, eq=False)
class _Link:
    address: PeerAddress
    liveness: Liveness
    status: PairStatus
    state: LinkState = LinkState.DOWN
    epoch: int = 0
    hello: Hello | None = None
    # Incarnation at the other end, once it has said Welcome.
    hears: bytes = b""
    terms: Terms | None = None
    # Not announced any more; kept while its writers may touch pages.
    leaving: bool = False
    # Somebody else lives at its endpoint: no stream is opened any more, only proof can settle its pages.
    abandoned: bool = False


class GenerationControl:
    """`say(peer, body)` queues a message, `end(peer, reason, text)` ends the stream after what was queued,
    `start(address)` opens streams to a peer from now on, again and again, `stop(peer)` ends that. None may call back.
    `on_pair` is told of every change.
    """

    def __init__(
        self,
        local: InstanceInfo,
        config: TransferConfig,
        sessions: ReceiveSessions,
        intents: Intents,
        chunks: BounceReceive,
        say: Callable[[PeerId, PeerBody], None],
        end: Callable[[PeerId, EndReason, str], None],
        start: Callable[[PeerAddress], None],
        stop: Callable[[PeerId], None],
        on_pair: Callable[[PairStatus], None],
        dialect: Dialect | None = None,
    ) -> None:
        self._local, self._config, self._sessions, self._intents = local, config, sessions, intents
        self._chunks = chunks
        self._say, self._end, self._start, self._stop, self._on_pair = say, end, start, stop, on_pair
        self._dialect, self._limits = dialect or Dialect(), limits_of(config)
        self._links: dict[PeerId, _Link] = {}
        # One count for all links: two links may reach the same incarnation while the coordinator's list is old.
        self._epoch = 0

    def set_peers(self, addresses: Sequence[PeerAddress], now: float) -> None:
        """The complete list of context instances, of which `max_peers` are kept. An instance that comes back with
        another incarnation supersedes the old one; one that moved to another endpoint is opened there."""
        wanted = {(one.instance_id, one.incarnation): one for one in self._chosen(addresses)}
        names = {one.instance_id for one in addresses}
        for peer, link in list(self._links.items()):
            if peer not in wanted:
                self._leave(peer, link, superseded=peer[0] in names, now=now)
            elif wanted[peer].endpoint != link.address.endpoint:
                if not link.abandoned:
                    self._stop(peer)
                self.closed(peer, now)
                link.address, link.abandoned = wanted[peer], False
                self._start(link.address)
        for peer, address in wanted.items():
            link = self._links.get(peer)
            if link is None:
                status = PairStatus(*peer, PairState.CONNECTING)
                self._links[peer] = _Link(address, Liveness(self._config.ping_s, now), status)
                self._sessions.peer_known(peer)
                self._on_pair(status)
                self._start(address)
            elif link.leaving and not link.abandoned:
                link.leaving = False
                self._sessions.peer_known(peer)
        for peer, link in self._links.items():
            if link.state is not LinkState.READY:
                self._abandon_if_replaced(peer, link)

    def opened(self, peer: PeerId, now: float) -> None:
        """A stream to the peer exists: greet."""
        link = self._links[peer]
        self._epoch += 1
        link.epoch = self._epoch
        link.state, link.liveness = LinkState.GREETING, Liveness(self._config.ping_s, now)
        link.hears = b""
        link.hello = make_hello(self._local, self._limits, link.epoch, self._dialect, self._config.require_path)
        self._say(peer, link.hello)

    def closed(self, peer: PeerId, now: float) -> None:
        """The stream is gone, for whatever reason, or could not be opened."""
        link = self._links.get(peer)
        if link is None or link.state is LinkState.DOWN:
            return
        link.state, link.hello = LinkState.DOWN, None
        self._sessions.stream_broke(peer, now)
        self._intents.stream_broke(peer)
        self._abandon_if_replaced(peer, link)
        if link.status.state is PairState.READY:
            self._set(link, PairStatus(*peer, PairState.CONNECTING))

    def envelope(self, peer: PeerId, envelope: Envelope, now: float) -> None:
        """Everything that came at once. Raises ProtocolError: the driver then ends the stream."""
        link = self._links.get(peer)
        if link is None or link.state is LinkState.DOWN:
            return
        if envelope.dst_incarnation != self._local.incarnation:
            raise ProtocolError(f"an envelope of {peer[0]} is meant for another incarnation")
        link.liveness.heard(now)
        for message in envelope.messages:
            # A message may have ended the stream: what came with it then is from nobody.
            if link.state is LinkState.GREETING:
                self._greeted(peer, link, envelope, message, now)
            elif link.state is LinkState.READY:
                self._said(peer, link, envelope, message, now)

    def tick(self, now: float) -> None:
        """Probes quiet streams, lets go of links that nobody needs."""
        for peer, link in list(self._links.items()):
            if link.leaving and not self._sessions.has_open(peer):
                self._drop(peer)
                continue
            if link.state is LinkState.DOWN:
                continue
            match link.liveness.tick(now):
                case Probe.PING if link.state is LinkState.READY:
                    self._say(peer, Ping(int(now * 1e3)))
                case Probe.SUSPECT:
                    self._finish(peer, EndReason.SILENT, "probes were not answered", now)
                case _:
                    pass

    def goodbye(self, reason: str) -> None:
        """This instance stops: what it has asked for is not wanted any more."""
        for peer, link in self._links.items():
            if link.state is LinkState.READY:
                self._say(peer, Goodbye(reason))

    def speaks_to(self, peer: PeerId) -> bytes:
        """Incarnation that envelopes are meant for; empty before Welcome."""
        link = self._links.get(peer)
        return b"" if link is None else link.hears

    def is_ready(self, peer: PeerId) -> bool:
        """True when sessions may talk to the peer."""
        link = self._links.get(peer)
        return link is not None and link.state is LinkState.READY

    def pairs(self) -> list[PairStatus]:
        """One per announced context instance."""
        return [link.status for link in self._links.values() if not link.leaving]

    def terms(self) -> dict[PeerId, Terms]:
        """What is agreed with each context instance whose stream is ready."""
        return {peer: one.terms for peer, one in self._links.items() if one.state is LinkState.READY and one.terms}

    def _chosen(self, addresses: Sequence[PeerAddress]) -> list[PeerAddress]:
        most = self._config.max_peers
        if len(addresses) > most:
            log.warning("%d context instances, streams to %d (transfer.max_peers)", len(addresses), most)
        return choose(addresses, most, self._local.instance_id, self._sessions.has_open, self._sessions.last_used)

    def _leave(self, peer: PeerId, link: _Link, *, superseded: bool, now: float) -> None:
        if superseded:
            self._lost(self._sessions.peer_superseded, peer, f"instance {peer[0]} has been restarted", now)
        else:
            self._lost(self._sessions.peer_gone, peer, f"instance {peer[0]} is not announced any more", now)
        link.leaving = True
        if not self._sessions.has_open(peer):
            self._drop(peer)

    def _drop(self, peer: PeerId) -> None:
        if not self._links.pop(peer).abandoned:
            self._stop(peer)

    def _abandon_if_replaced(self, peer: PeerId, link: _Link) -> None:
        """A link that is leaving does not compete with the one that has its endpoint now."""
        taken = any(
            not other.leaving and other.address.endpoint == link.address.endpoint for other in self._links.values()
        )
        if link.leaving and taken:
            self._abandon(peer, link)

    def _abandon(self, peer: PeerId, link: _Link) -> None:
        if not link.abandoned:
            link.abandoned = True
            self._stop(peer)

    def _greeted(self, peer: PeerId, link: _Link, envelope: Envelope, message: PeerBody, now: float) -> None:
        match message:
            case Reject(incompatibilities):
                self._incompatible(peer, link, swapped(incompatibilities), now)
            case Welcome():
                self._welcome(peer, link, envelope, message, now)
            case ExitReport(ranks, reason):
                # While the list of peers is old, another incarnation may live at the endpoint: its dead are not ours.
                if envelope.src_incarnation == peer[1]:
                    self._sessions.peer_ranks_exited(peer, ranks, reason, now)
            case Ping(nonce):
                self._say(peer, Pong(nonce))
            case _:
                raise ProtocolError(f"{type(message).__name__} of {peer[0]} before Welcome")

    def _welcome(self, peer: PeerId, link: _Link, envelope: Envelope, welcome: Welcome, now: float) -> None:
        if link.hello is None or welcome.connection_epoch != link.epoch:
            raise ProtocolError(f"Welcome of {peer[0]} answers stream {welcome.connection_epoch}, not {link.epoch}")
        if envelope.src_incarnation != welcome.instance.incarnation:
            raise ProtocolError(f"Welcome of {peer[0]} describes another incarnation than its envelope")
        link.hears = envelope.src_incarnation
        self._sessions.peer_exited(welcome.instance.instance_id, welcome.instance.exited_incarnations, now)
        found = (welcome.instance.instance_id, welcome.instance.incarnation)
        if found != peer:
            reason = f"{link.address.endpoint} now is incarnation {found[1].hex()}"
            self._lost(self._sessions.peer_superseded, peer, reason, now)
            self._finish(peer, EndReason.UNNEEDED, f"not instance {peer[0]}, incarnation {peer[1].hex()}", now)
            self._abandon(peer, link)
            return
        verdict = check_welcome(link.hello, welcome)
        if not isinstance(verdict, Terms):
            self._say(peer, Reject(swapped(verdict)))
            self._incompatible(peer, link, verdict, now)
            return
        link.state = LinkState.READY
        if not link.leaving:
            # Again: it may have been incompatible, or have said goodbye and stayed after all.
            self._sessions.peer_known(peer)
        link.terms = verdict
        log.info("context instance %s is ready: %s", peer[0], verdict)
        reconciles = Capability.RECONCILE in verdict.capabilities
        self._sessions.stream_ready(peer, ReceivePeer(verdict.plans, verdict.limits, reconciles), now)
        self._intents.stream_ready(peer, Capability.GENERATION_FIRST in verdict.capabilities)
        self._set(link, PairStatus(*peer, PairState.READY))

    def _said(self, peer: PeerId, link: _Link, envelope: Envelope, message: PeerBody, now: float) -> None:
        if envelope.src_incarnation != peer[1]:
            raise ProtocolError(f"{type(message).__name__} of {peer[0]} speaks for another incarnation")
        match message:
            case TransferNotice():
                self._sessions.notice(peer, message, now)
            case ChunkReady() | BounceChunk():
                self._chunks.said(peer, message)
            case ReconcileReply():
                self._sessions.reconciled(peer, message, now)
            case Bind(key, dp_rank):
                self._intents.bound(peer, key, dp_rank)
            case NotBound(key, reason):
                self._intents.not_bound(peer, key, reason)
            case FirstTokens(key, payload):
                self._intents.first_tokens(peer, key, payload)
            case ExitReport(ranks, reason):
                self._sessions.peer_ranks_exited(peer, ranks, reason, now)
            case Goodbye(reason):
                log.info("context instance %s says goodbye: %s", peer[0], reason)
                self._lost(self._sessions.peer_gone, peer, f"instance {peer[0]} stops: {reason}", now)
            case Ping(nonce):
                self._say(peer, Pong(nonce))
            case Pong():
                pass
            case Reject(incompatibilities):
                self._incompatible(peer, link, swapped(incompatibilities), now)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a generation instance")

    def _incompatible(self, peer: PeerId, link: _Link, reasons: tuple[Incompatibility, ...], now: float) -> None:
        log.warning("context instance %s: %s", peer[0], "; ".join(map(str, reasons)))
        self._set(link, PairStatus(*peer, PairState.INCOMPATIBLE, reasons))
        self._lost(
            self._sessions.peer_refused,
            peer,
            f"instance {peer[0]} is incompatible: {'; '.join(map(str, reasons)) or 'no reason given'}",
            now,
        )
        self._finish(peer, EndReason.REJECTED, "the pair can not work", now)

    def _finish(self, peer: PeerId, reason: EndReason, text: str, now: float) -> None:
        self._end(peer, reason, text)
        self.closed(peer, now)

    def _lost(self, how: Callable[[PeerId, str, float], None], peer: PeerId, reason: str, now: float) -> None:
        how(peer, reason, now)
        self._intents.peer_gone(peer, reason)

    def _set(self, link: _Link, status: PairStatus) -> None:
        if link.status == status:
            return
        link.status = status
        if not link.leaving:
            self._on_pair(status)
