"""The hub's part in hand-offs: carries messages between scheduler, ranks and peers, and keeps time. Decides nothing.

scheduler role ◀─▶ from_scheduler / deliver       peers ◀─▶ Connect streams (servicer, links)
rank roles     ◀─▶ from_rank / rank_ports         clock ──▶ tick
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtransfer.errors import KVTransferError
from kvtransfer.hub.core import HubCore
from kvtransfer.hub.engine_status import EngineStatus
from kvtransfer.hub.fence_call import FenceCalls
from kvtransfer.hub.link import Link
from kvtransfer.hub.servicer import KvTransferServicer
from kvtransfer.hub.tools import HubTools
from kvtransfer.rank_info import InstanceInfo
from kvtransfer.session.actions import EndReason

if TYPE_CHECKING:
    from isthmus_core.config import TlsConfig
    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.control.generation import PairStatus, PeerAddress
    from kvtransfer.control.negotiation import Dialect
    from kvtransfer.hub.estimates import PairEstimate
    from kvtransfer.hub.outbox import Outbox
    from kvtransfer.messages import Envelope, FenceAnswer, FenceWriter, PeerBody, SessionView
    from kvtransfer.ports import HubToRank, HubToScheduler, RankPort, RankToHub, SchedulerToHub
    from kvtransfer.rank_info import InstanceRole, ModelFingerprint, RankInfo
    from kvtransfer.session.actions import PeerId

log = logging.getLogger(__name__)

TICK_S = 0.05
_FLUSH_S = 0.005


class TransferHub:
    """One instance's hand-offs. Everything is called on the event loop, and nothing but `drain` and `close` waits.

    deliver(message)      takes outcomes for the scheduler role, in order
    on_pair(status)       is told of every change of a pair (generation side); on_estimate(one) of its cost (context)
    rank_ports[r]         the way to rank r
    status()              the engine's numbers for ListSessions; without it, what the open sessions hold
    kill_rank(r, why)     SIGKILLs a rank whose writes a peer suspects; `rank_exited` must follow
    stop_instance(why)    ends the instance: peers that can not be reached may write too much of its memory
    exited_incarnations   earlier incarnations on this host of which every process is proven to have exited
    """

    def __init__(
        self,
        *,
        instance_id: str,
        incarnation: bytes,
        endpoint: str,
        role: InstanceRole,
        model: ModelFingerprint,
        config: TransferConfig,
        rank_ports: Sequence[RankPort],
        deliver: Callable[[HubToScheduler], None],
        on_pair: Callable[[PairStatus], None],
        on_estimate: Callable[[PairEstimate], None] = lambda _: None,
        kill_rank: Callable[[int, str], None],
        stop_instance: Callable[[str], None],
        tracing: Tracing,
        status: Callable[[], EngineStatus] | None = None,
        tls: TlsConfig | None = None,
        exited_incarnations: tuple[bytes, ...] = (),
        dialect: Dialect | None = None,
    ) -> None:
        self.incarnation = incarnation
        self._identity = (instance_id, incarnation, endpoint, role, model)
        self._config, self._tracing, self._tls, self._dialect = config, tracing, tls, dialect
        self._rank_ports, self._exited = tuple(rank_ports), exited_incarnations
        self._deliver, self._on_pair, self._status = deliver, on_pair, status
        self._kill_rank, self._stop_instance = kill_rank, stop_instance
        self._core: HubCore | None = None
        self._cores: dict[InstanceRole, HubCore] = {}
        self._streams: dict[int, Outbox] = {}
        self._links: dict[PeerId, Link] = {}
        self._outboxes: dict[PeerId, Outbox] = {}
        self._ready_once: set[PeerId] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._fences = FenceCalls((instance_id, incarnation), tls, self._fence_answered)
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.tools = HubTools(self, tls, on_estimate)
        self.servicer = KvTransferServicer(self)

    # --- life

    def start(self, rank_infos: Sequence[RankInfo]) -> None:
        """Every rank has announced itself: peers are answered from now on. Raises GeometryError when the ranks do not
        make an instance, KVTransferError when there is not one port for each."""
        if len(rank_infos) != len(self._rank_ports):
            raise KVTransferError(
                f"{len(rank_infos)} ranks announced themselves, {len(self._rank_ports)} are connected"
            )
        instance_id, incarnation, endpoint, role, model = self._identity
        ranks = tuple(sorted(rank_infos, key=lambda info: info.rank))
        local = InstanceInfo(instance_id, incarnation, endpoint, role, model, ranks, self._exited)
        self._core = HubCore(local, self._config, self, self._tracing, self._dialect)
        self._ticker = asyncio.create_task(self._tick(), name="kv-hub-tick")
        self._ticker.add_done_callback(_report)

    async def drain(self, deadline_s: float) -> None:
        """Returns when no session is left and everything has been said. Raises TimeoutError naming what is left after
        `deadline_s` seconds."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
                # What the peers have to know must have left as well.
                while self._waiting:  # noqa: ASYNC110  # several queues, once, at the end of a life
                    await asyncio.sleep(_FLUSH_S)
        except TimeoutError:
            left = ", ".join(f"{view.key} {view.state}" for view in self.sessions()[:8])
            raise TimeoutError(f"{len(self.sessions())} hand-offs are open after {deadline_s:g} s: {left}") from None

    async def close(self) -> None:
        """Ends streams and tasks. No outcome is delivered after it: pages that are still exposed stay so."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await asyncio.gather(self._fences.close(), self.tools.close())
        await self._end_streams("this instance stops")

    async def _end_streams(self, why: str) -> None:
        for peer in list(self._links):
            self.link_stop(peer)
        for number in list(self._streams):
            self.stream_end(number, EndReason.UNAVAILABLE, why)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def set_role(self, role: InstanceRole) -> None:
        """Every stream ends, peers of the new role come. `drain` first: raises KVTransferError while work is open."""
        if not self.is_idle():
            raise KVTransferError("hand-offs are open: a role changes when none is")
        self.core.set_peers((), time.monotonic())
        await self._end_streams(f"this instance becomes {role.name}")
        while self._streams:  # noqa: ASYNC110  # their calls end by themselves, within seconds
            await asyncio.sleep(_FLUSH_S)
        self._cores[self.core.local.role] = self.core  # a role that comes back goes on where its counts were
        local = replace(self.core.local, role=role)
        self._core = self._cores.get(role) or HubCore(local, self._config, self, self._tracing, self._dialect)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.core.tick(time.monotonic())
            self.tools.tick()
            self._look()

    # --- from this instance

    def from_scheduler(self, message: SchedulerToHub) -> None:
        """A message of the scheduler role. Raises TransferStateError for a key that is in use."""
        self.core.from_scheduler(message, time.monotonic())
        self._look()

    def from_rank(self, rank: int, message: RankToHub) -> None:
        """An event of a rank role."""
        if self._core is not None:
            self.tools.heard(message)
            self._core.from_rank(rank, message, time.monotonic())
            self._look()

    def rank_exited(self, rank: int, reason: str) -> None:
        """The parent has reaped the rank: after `drain_s` its open writes are over."""
        if self._core is not None:
            self._core.rank_exited(rank, reason, time.monotonic())
            self._look()

    def goodbye(self, reason: str) -> None:
        """This instance stops and its ranks have exited (`rank_exited` was called for each): peers are told."""
        if self._core is not None:
            self._core.goodbye(reason)

    def set_context_peers(self, addresses: Sequence[PeerAddress]) -> None:
        """The complete list of context instances to keep a stream to."""
        self.core.set_peers(addresses, time.monotonic())
        self._look()

    # --- questions

    @property
    def started(self) -> bool:
        """True when every rank has announced itself."""
        return self._core is not None

    @property
    def core(self) -> HubCore:
        """Raises KVTransferError before `start`."""
        if self._core is None:
            raise KVTransferError("the ranks of this instance have not announced themselves yet")
        return self._core

    @property
    def instance(self) -> InstanceInfo:
        """This instance as its peers know it. Raises KVTransferError before `start`."""
        return self.core.local

    def pairs(self) -> list[PairStatus]:
        """One per announced context instance."""
        return [] if self._core is None else self._core.generation.pairs()

    def sessions(self) -> list[SessionView]:
        """One per attempt that holds pages."""
        return [] if self._core is None else self._core.views(time.monotonic())

    def in_doubt_pages(self) -> int:
        """Destination pages whose writers can not be asked."""
        return 0 if self._core is None else self._core.in_doubt_pages

    def is_idle(self) -> bool:
        """True when no session is open, every destination page is free and nothing waits for a stream. Raises
        LedgerError when pages and attempts disagree."""
        if self._core is None:
            return True
        self._core.ledger.check_integrity()
        return self._core.is_idle and not self._waiting

    def engine_status(self) -> EngineStatus:
        """The engine's part of ListSessions."""
        if self._status is not None:
            return self._status()
        views, total = self.sessions(), self.core.ledger.capacity
        return EngineStatus(max(0, total - sum(view.pages for view in views)), total, len(views))

    @property
    def _waiting(self) -> int:
        return sum(outbox.waiting for outbox in (*self._streams.values(), *self._outboxes.values()))

    def _look(self) -> None:
        if self.core.is_idle:
            self._idle.set()
        else:
            self._idle.clear()

    # --- streams of generation instances (servicer)

    def stream_opened(self, number: int, outbox: Outbox) -> None:
        self._streams[number] = outbox
        self.core.context.opened(number, time.monotonic())

    def stream_envelope(self, number: int, envelope: Envelope) -> None:
        """Raises ProtocolError."""
        now = time.monotonic()
        try:
            self.core.context.envelope(number, envelope, now)
        finally:
            self.core.settle_lost(now)
            self._look()

    def stream_closed(self, number: int) -> None:
        self._streams.pop(number, None)
        self.core.context.closed(number, time.monotonic())

    def fence_asked(self, incarnation: bytes, asker: PeerId, fence: FenceWriter) -> FenceAnswer:
        """A peer without a stream suspects writers of `incarnation`."""
        return self.core.fence_asked(incarnation, asker, fence)

    def _fence_answered(self, peer: PeerId, answer: FenceAnswer) -> None:
        self.core.fence_answered(peer, answer, time.monotonic())
        self._look()

    # --- streams to context instances (link.LinkEvents)

    def link_opened(self, peer: PeerId, outbox: Outbox) -> None:
        self._outboxes[peer] = outbox
        self.core.generation.opened(peer, time.monotonic())

    def link_envelope(self, peer: PeerId, outbox: Outbox, envelope: Envelope) -> None:
        """Raises ProtocolError."""
        if self._outboxes.get(peer) is not outbox:
            return
        try:
            self.core.generation.envelope(peer, envelope, time.monotonic())
        finally:
            if self.core.generation.is_ready(peer):
                self._ready_once.add(peer)
            self._look()

    def link_closed(self, peer: PeerId, outbox: Outbox) -> None:
        # A link that was moved to another endpoint may have a new stream by now.
        if self._outboxes.get(peer) is not outbox:
            return
        del self._outboxes[peer]
        self._ready_once.discard(peer)
        self.core.generation.closed(peer, time.monotonic())

    def link_was_ready(self, peer: PeerId) -> bool:
        return peer in self._ready_once

    # --- what the core wants done (core.Effects)

    def deliver(self, message: HubToScheduler) -> None:
        self._deliver(message)

    def pair(self, status: PairStatus) -> None:
        self._on_pair(status)

    def fence(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        self._fences.ask(peer, endpoint, fence)

    def kill_rank(self, rank: int, reason: str) -> None:
        log.error("rank %d is killed: %s", rank, reason)
        self._kill_rank(rank, reason)

    def stop_instance(self, reason: str) -> None:
        self._stop_instance(reason)

    def to_rank(self, rank: int, message: HubToRank) -> None:
        self._rank_ports[rank].send(message)

    def stream_say(self, stream: int, body: PeerBody) -> None:
        self._streams[stream].say(body, self.core.context.speaks_to(stream))

    def stream_end(self, stream: int, reason: EndReason, text: str) -> None:
        self._streams[stream].end(reason, text)

    def link_say(self, peer: PeerId, body: PeerBody) -> None:
        self._outboxes[peer].say(body, self.core.generation.speaks_to(peer))

    def link_end(self, peer: PeerId, reason: EndReason, text: str) -> None:
        self._outboxes[peer].end(reason, text)

    def link_start(self, address: PeerAddress) -> None:
        link = Link(address, self.incarnation, self, self._tls)
        link.task.add_done_callback(_report)
        self._links[address.instance_id, address.incarnation] = link

    def link_stop(self, peer: PeerId) -> None:
        task = self._links.pop(peer).stop()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _report(task: asyncio.Task[None]) -> None:
    """A task that should only ever be cancelled has failed: nothing awaits it, so the loop is told."""
    if not task.cancelled() and (error := task.exception()) is not None:
        message = f"{task.get_name()} failed"
        task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})
