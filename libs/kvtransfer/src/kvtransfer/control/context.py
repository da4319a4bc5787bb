"""The context hub's side of all its streams.

opened ─▶ WAIT_HELLO ── Hello fits ─▶ LOADING ── every rank has loaded the peer ─▶ READY
              │ Hello does not fit       │ a rank refuses, another stream took over   │ broken, silent, replaced
              └──────── Reject ──────────┴──────────────────────────────────────────▶ ENDED
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvtransfer.bounce_ports import Grant
from kvtransfer.control.liveness import Liveness, Probe
from kvtransfer.control.negotiation import Dialect, Terms, answer_hello, limits_of, make_welcome
from kvtransfer.errors import ProtocolError
from kvtransfer.messages import (
    Cancel,
    Capability,
    Envelope,
    ExitReport,
    FenceWriter,
    Goodbye,
    Hello,
    KvIntent,
    KvRequest,
    PeerBody,
    Ping,
    Pong,
    Reconcile,
    Reject,
)
from kvtransfer.peer_plan import combine_digests
from kvtransfer.ports import ForgetPeer, LoadPeer, PeerLoaded
from kvtransfer.session.actions import Emit, EndReason, PeerId, ToRank
from kvtransfer.session.transmit import TransmitSessions
from kvtransfer.session.transmit_attempt import TransmitPeer

if TYPE_CHECKING:
    from kvtransfer.config import TransferConfig
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.session.bindings import Bindings
    from kvtransfer.session.bounce_transmit import BounceTransmit

log = logging.getLogger(__name__)

# A peer without a stream and without writes is unloaded after this time: its agents hold connections and memory.
FORGET_AFTER_S = 60.0


class StreamState(Enum):
    """Where a stream is."""

    WAIT_HELLO = auto()
    LOADING = auto()
    READY = auto()


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    liveness: Liveness
    state: StreamState = StreamState.WAIT_HELLO
    # Incarnation at the other end, once it has said Hello.
    hears: bytes = b""
    peer: PeerId | None = None
    epoch: int = 0
    terms: Terms | None = None
    loaded: dict[int, PeerLoaded] = field(default_factory=dict[int, PeerLoaded])


@dataclass(slots=True, eq=False)
class _Peer:
    """A generation instance that ranks have been told to load. `quiet_since`: without a stream since then."""

    epoch: int
    stream: int | None
    quiet_since: float


class ContextControl:
    """Streams are numbered by the driver. `say(stream, body)` queues a message, `end(stream, reason, text)` ends the
    stream after what was queued; both must not call back, nor must `emit`."""

    def __init__(
        self,
        local: InstanceInfo,
        config: TransferConfig,
        sessions: TransmitSessions,
        bindings: Bindings,
        chunks: BounceTransmit,
        emit: Emit,
        say: Callable[[int, PeerBody], None],
        end: Callable[[int, EndReason, str], None],
        dialect: Dialect | None = None,
    ) -> None:
        self._local, self._config, self._sessions, self._bindings = local, config, sessions, bindings
        self._chunks = chunks
        self._emit, self._say, self._end = emit, say, end
        self._dialect, self._limits = dialect or Dialect(), limits_of(config)
        self._streams: dict[int, _Stream] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._gone_ranks: dict[int, str] = {}

    def opened(self, number: int, now: float) -> None:
        """A peer has opened a stream."""
        self._streams[number] = _Stream(number, Liveness(self._config.ping_s, now))

    def closed(self, number: int, now: float) -> None:
        """The stream is gone, for whatever reason. Writes go on; the peer will ask about them."""
        stream = self._streams.pop(number, None)
        if stream is None or stream.peer is None:
            return
        peer = self._peers.get(stream.peer)
        if peer is not None and peer.stream == number:
            peer.stream, peer.quiet_since = None, now

    def envelope(self, number: int, envelope: Envelope, now: float) -> None:
        """Everything that came at once. Raises ProtocolError: the driver then ends the stream with that text."""
        stream = self._streams.get(number)
        if stream is None:
            return
        stream.liveness.heard(now)
        for message in envelope.messages:
            if isinstance(message, Hello):
                self._hello(stream, envelope, message, now)
            else:
                self._said(stream, envelope, message, now)
            if stream.number not in self._streams:
                return

    def rank_loaded(self, rank: int, loaded: PeerLoaded, now: float) -> None:
        """A rank has loaded a peer, or says why it can not."""
        peer = self._peers.get((loaded.instance_id, loaded.incarnation))
        stream = None if peer is None or peer.stream is None else self._streams.get(peer.stream)
        if stream is None or stream.state is not StreamState.LOADING or stream.terms is None:
            return
        stream.loaded[rank] = loaded
        if len(stream.loaded) < len(self._local.ranks):
            return
        answers = [stream.loaded[number] for number in sorted(stream.loaded)]
        problems = tuple(problem for answer in answers for problem in answer.incompatibilities)
        if any(answer.later for answer in answers):
            self._finish(stream, EndReason.UNAVAILABLE, "; ".join(map(str, problems)), now)
            return
        if problems:
            self._reject(stream, Reject(problems), now)
            return
        digest = combine_digests([answer.plan_digest for answer in answers])
        stream.state = StreamState.READY
        writers = tuple((plan.src_rank, plan.dst_rank) for plan in stream.terms.plans)
        groups = {plan.src_rank: plan.src_dp for plan in stream.terms.plans if plan.src_dp}
        peer_id = (loaded.instance_id, loaded.incarnation)
        self._sessions.meet(peer_id, TransmitPeer(writers, stream.terms.limits, groups))
        self._say(stream.number, make_welcome(self._local, stream.terms, digest, stream.epoch))
        log.info("generation instance %s may ask: %s", loaded.instance_id, stream.terms)

    def rank_exited(self, rank: int, reason: str, now: float) -> None:
        """A rank is gone, by its parent's report: peers are told, and no peer can be loaded any more."""
        self._gone_ranks[rank] = reason
        for stream in list(self._streams.values()):
            if stream.state is not StreamState.WAIT_HELLO:
                self._say(stream.number, self._exit_report())
            if stream.state is StreamState.LOADING:
                self._finish(stream, EndReason.UNAVAILABLE, f"rank {rank} is gone", now)

    def goodbye(self, reason: str) -> None:
        """This instance stops: nobody should ask for anything new."""
        for stream in self._streams.values():
            if stream.state is StreamState.READY:
                self._say(stream.number, Goodbye(reason))

    def tick(self, now: float) -> None:
        """Probes quiet streams, unloads peers that nobody needs."""
        for stream in list(self._streams.values()):
            match stream.liveness.tick(now):
                case Probe.PING if stream.state is StreamState.READY:
                    self._say(stream.number, Ping(int(now * 1e3)))
                case Probe.SUSPECT:
                    self._finish(stream, EndReason.SILENT, "probes were not answered", now)
                case _:
                    pass
        for peer_id, peer in list(self._peers.items()):
            if peer.stream is None and now >= peer.quiet_since + self._config.timeout_s:
                # Its own deadlines have passed; nobody would ever say so.
                self._sessions.goodbye(peer_id, f"no stream of instance {peer_id[0]} for a long time", now)
            if peer.stream is None and now >= peer.quiet_since + FORGET_AFTER_S:
                self._forget(peer_id)

    def speaks_to(self, number: int) -> bytes:
        """Incarnation that envelopes on the stream are meant for; empty before Hello."""
        stream = self._streams.get(number)
        return b"" if stream is None else stream.hears

    def stream_of(self, peer: PeerId) -> int | None:
        """The ready stream with a peer."""
        known = self._peers.get(peer)
        if known is None or known.stream is None or self._streams[known.stream].state is not StreamState.READY:
            return None
        return known.stream

    def terms(self) -> dict[PeerId, Terms]:
        """What is agreed with each generation instance whose stream is ready."""
        ready = [one for one in self._streams.values() if one.state is StreamState.READY]
        return {one.peer: one.terms for one in ready if one.peer is not None and one.terms is not None}

    def _hello(self, stream: _Stream, envelope: Envelope, hello: Hello, now: float) -> None:
        if stream.state is not StreamState.WAIT_HELLO:
            raise ProtocolError("a second Hello on one stream")
        if envelope.src_incarnation != hello.instance.incarnation:
            raise ProtocolError("Hello describes another incarnation than the envelope it came in")
        stream.hears = envelope.src_incarnation
        verdict = answer_hello(self._local, self._limits, hello, self._dialect)
        if not isinstance(verdict, Terms):
            log.warning("generation instance %s: %s", hello.instance.instance_id, "; ".join(map(str, verdict)))
            self._reject(stream, Reject(verdict), now)
            return
        if self._gone_ranks:
            # Pages that were asked for on an earlier stream may wait for this proof.
            self._say(stream.number, self._exit_report())
            self._finish(stream, EndReason.UNAVAILABLE, f"ranks {sorted(self._gone_ranks)} are gone", now)
            return
        peer_id = (hello.instance.instance_id, hello.instance.incarnation)
        known = self._peers.get(peer_id)
        if known is not None and hello.connection_epoch <= known.epoch:
            text = f"connection epoch {hello.connection_epoch} is not above {known.epoch}"
            self._finish(stream, EndReason.REPLACED, text, now)
            return
        if known is not None and known.stream is not None:
            self._finish(self._streams[known.stream], EndReason.REPLACED, "the peer has opened another stream", now)
        self._drop_predecessors(peer_id, now)
        self._peers[peer_id] = _Peer(hello.connection_epoch, stream.number, now)
        stream.state, stream.peer, stream.epoch, stream.terms = (
            StreamState.LOADING,
            peer_id,
            hello.connection_epoch,
            verdict,
        )
        for rank in range(len(self._local.ranks)):
            bounce = Capability.BOUNCE_PACKING_1 in verdict.capabilities
            self._emit(ToRank(rank, LoadPeer(hello.instance, self._local.ranks, bounce, hello.require_path)))

    def _said(self, stream: _Stream, envelope: Envelope, message: PeerBody, now: float) -> None:
        peer = stream.peer
        if stream.state is not StreamState.READY or peer is None:
            raise ProtocolError(f"{type(message).__name__} before Welcome")
        # A Pong may have been said before Welcome had arrived: it names nobody then.
        unnamed = isinstance(message, Pong) and not envelope.dst_incarnation
        named = unnamed or envelope.dst_incarnation == self._local.incarnation
        if envelope.src_incarnation != peer[1] or not named:
            raise ProtocolError(f"{type(message).__name__} speaks for other incarnations than Hello and Welcome")
        match message:
            case KvRequest():
                self._sessions.request(peer, message, now)
            case KvIntent(key):
                self._bindings.intent(peer, key)
            case Grant():
                self._chunks.granted(peer, message)
            case Cancel(key, receive):
                self._sessions.cancel(peer, key, receive, now)
            case Reconcile(receives):
                self._chunks.reconcile(peer, receives)
                self._sessions.reconcile(peer, receives, now)
            case FenceWriter(receives):
                for notice in self._sessions.fence(peer, receives):
                    self._say(stream.number, notice)
                if self._gone_ranks:
                    self._say(stream.number, self._exit_report())
            case Goodbye(reason):
                log.info("generation instance %s says goodbye: %s", peer[0], reason)
                self._sessions.goodbye(peer, f"instance {peer[0]} stops: {reason}", now)
            case Ping(nonce):
                self._say(stream.number, Pong(nonce))
            case Pong():
                pass
            case Reject(incompatibilities):
                reasons = "; ".join(map(str, incompatibilities))
                log.warning("generation instance %s refuses: %s", peer[0], reasons)
                self._finish(stream, EndReason.REJECTED, "refused by the generation instance", now)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a context instance")

    def _exit_report(self) -> ExitReport:
        return ExitReport(tuple(sorted(self._gone_ranks)), "; ".join(dict.fromkeys(self._gone_ranks.values())))

    def _reject(self, stream: _Stream, reject: Reject, now: float) -> None:
        self._say(stream.number, reject)
        self._finish(stream, EndReason.REJECTED, "the pair can not work", now)

    def _finish(self, stream: _Stream, reason: EndReason, text: str, now: float) -> None:
        self._end(stream.number, reason, text)
        self.closed(stream.number, now)

    def _drop_predecessors(self, peer_id: PeerId, now: float) -> None:
        """Earlier incarnations of an instance that has come back: nobody waits for what they asked for."""
        for other, peer in list(self._peers.items()):
            if other[0] == peer_id[0] and other != peer_id and peer.stream is None:
                self._sessions.goodbye(other, f"instance {other[0]} has been restarted", now)
                self._forget(other)

    def _forget(self, peer_id: PeerId) -> None:
        if self._sessions.has_open(peer_id):
            return
        del self._peers[peer_id]
        self._sessions.forget(peer_id)
        self._chunks.forget(peer_id)
        for rank in range(len(self._local.ranks)):
            self._emit(ToRank(rank, ForgetPeer(*peer_id)))
