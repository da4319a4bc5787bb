"""Either peer machine in a core whose effects are only written down."""

from __future__ import annotations

import dataclasses
from typing import Any

from hub_world import NO_TRACING
from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer.config import TransferConfig
from kvtransfer.control.generation import PairState, PairStatus, PeerAddress
from kvtransfer.control.negotiation import Dialect, answer_hello, limits_of, make_hello, make_welcome
from kvtransfer.hub.core import HubCore
from kvtransfer.messages import (
    Envelope,
    FenceWriter,
    Hello,
    PeerBody,
)
from kvtransfer.peer_plan import build_rank_plans, plan_digest, rank_digest
from kvtransfer.ports import HubToRank, HubToScheduler, Incompatibility, PeerLoaded
from kvtransfer.rank_info import InstanceInfo, InstanceRole
from kvtransfer.session.actions import EndReason, PeerId

CONFIG = TransferConfig("loopback", ping_s=1)
TABLES = [Storage(Shape(), "slot_major", 4).page_table(rank % 2 * Shape().heads) for rank in range(4)]


def make(role: InstanceRole, name: str, offset: int = 0, **changes: Any) -> InstanceInfo:
    ranks = [rank_info(TABLES[offset + rank], rank, tp=2) for rank in range(2)]
    return dataclasses.replace(instance(*ranks, role=role, name=name), **changes)


CONTEXT = make(InstanceRole.CONTEXT, "c")
GENERATION = make(InstanceRole.GENERATION, "g", 2)
ADDRESS = PeerAddress("c", CONTEXT.incarnation, "c:1")
PEER: PeerId = ("c", CONTEXT.incarnation)


class Recorder:
    """core.Effects that only writes down."""

    def __init__(self, local: InstanceInfo, dialect: Dialect | None = None) -> None:
        self.said: list[tuple[object, PeerBody]] = []
        self.ended: list[tuple[object, EndReason]] = []
        self.started: list[PeerAddress] = []
        self.stopped: list[PeerId] = []
        self.pairs: list[PairState] = []
        self.orders: list[tuple[int, HubToRank]] = []
        self.fences: list[tuple[PeerId, str, FenceWriter]] = []
        self.kills: list[int] = []
        self.stops: list[str] = []
        self.core = HubCore(local, CONFIG, self, NO_TRACING, dialect)

    def deliver(self, message: HubToScheduler) -> None:
        raise AssertionError(message)

    def to_rank(self, rank: int, message: HubToRank) -> None:
        self.orders.append((rank, message))

    def stream_say(self, stream: int, body: PeerBody) -> None:
        self.said.append((stream, body))

    def stream_end(self, stream: int, reason: EndReason, text: str) -> None:
        self.ended.append((stream, reason))

    def link_say(self, peer: PeerId, body: PeerBody) -> None:
        self.said.append((peer, body))

    def link_end(self, peer: PeerId, reason: EndReason, text: str) -> None:
        self.ended.append((peer, reason))

    def link_start(self, address: PeerAddress) -> None:
        self.started.append(address)

    def link_stop(self, peer: PeerId) -> None:
        self.stopped.append(peer)

    def pair(self, status: PairStatus) -> None:
        self.pairs.append(status.state)

    def fence(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        self.fences.append((peer, endpoint, fence))

    def kill_rank(self, rank: int, reason: str) -> None:
        self.kills.append(rank)

    def stop_instance(self, reason: str) -> None:
        self.stops.append(reason)

    def kinds(self) -> list[str]:
        kinds, self.said[:] = [type(body).__name__ for _, body in self.said], []
        return kinds


class ContextSide(Recorder):
    def __init__(self) -> None:
        super().__init__(CONTEXT)
        self.control = self.core.context

    def hello(self, stream: int = 1, epoch: int = 1, info: InstanceInfo = GENERATION) -> None:
        self.control.opened(stream, 0.0)
        said = make_hello(info, limits_of(CONFIG), epoch, Dialect())
        self.control.envelope(stream, Envelope(info.incarnation, b"", (said,)), 0.0)

    def load(self, rank: int, info: InstanceInfo = GENERATION, problems: tuple[Incompatibility, ...] = ()) -> None:
        digest = rank_digest(build_rank_plans(CONTEXT.ranks[rank], info, CONTEXT.ranks))
        self.control.rank_loaded(rank, PeerLoaded(info.instance_id, info.incarnation, problems, digest), 1.0)

    def ready(self, stream: int = 1, epoch: int = 1, info: InstanceInfo = GENERATION) -> None:
        self.hello(stream, epoch, info)
        self.load(0, info)
        self.load(1, info)
        assert self.kinds() == ["Welcome"]

    def tell(
        self, *bodies: PeerBody, stream: int = 1, src: bytes = GENERATION.incarnation, dst: bytes = CONTEXT.incarnation
    ) -> None:
        self.control.envelope(stream, Envelope(src, dst, bodies), 2.0)


class GenerationSide(Recorder):
    def __init__(self) -> None:
        super().__init__(GENERATION)
        self.control = self.core.generation
        self.control.set_peers([ADDRESS], 0.0)
        assert self.started == [ADDRESS]

    def greet(self, peer: PeerId = PEER) -> Hello:
        self.control.opened(peer, 0.0)
        (_, said) = self.said.pop()
        assert isinstance(said, Hello)
        return said

    def welcome(self, said: Hello, info: InstanceInfo = CONTEXT, peer: PeerId = PEER, **changes: Any) -> None:
        terms = answer_hello(info, limits_of(CONFIG), said, Dialect())
        assert not isinstance(terms, tuple)
        body = make_welcome(info, terms, plan_digest(info, GENERATION), said.connection_epoch)
        self.tell(dataclasses.replace(body, **changes), src=info.incarnation, peer=peer)

    def tell(
        self,
        *bodies: PeerBody,
        src: bytes = CONTEXT.incarnation,
        dst: bytes = GENERATION.incarnation,
        peer: PeerId = PEER,
    ) -> None:
        self.control.envelope(peer, Envelope(src, dst, bodies), 1.0)

    def ready(self) -> None:
        self.welcome(self.greet())
        assert self.control.is_ready(PEER)
