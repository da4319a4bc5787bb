"""The two peer machines: what they say and do at every point of a stream's life, without any stream."""

from __future__ import annotations

import dataclasses
import os

import pytest

from hub_world import NO_TRACING
from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer.config import TransferConfig
from kvtransfer.control.context import FORGET_AFTER_S
from kvtransfer.control.generation import PairState, PairStatus, PeerAddress
from kvtransfer.control.negotiation import Dialect, answer_hello, limits_of, make_hello, make_welcome
from kvtransfer.errors import ProtocolError
from kvtransfer.hub.core import HubCore
from kvtransfer.messages import (
    Cancel,
    Capability,
    Envelope,
    ExitReport,
    FenceWriter,
    Goodbye,
    Hello,
    PeerBody,
    Ping,
    Pong,
    ReceiveKey,
    Reject,
    Welcome,
)
from kvtransfer.peer_plan import build_rank_plans, plan_digest, rank_digest
from kvtransfer.ports import ForgetPeer, HubToRank, HubToScheduler, Incompatibility, LoadPeer, PeerLoaded, RequestKey
from kvtransfer.rank_info import InstanceInfo, InstanceRole
from kvtransfer.session.actions import EndReason, Fence, PeerId, StopInstance

CONFIG = TransferConfig("loopback", ping_s=1)
TABLES = [Storage(Shape(), "slot_major", 4).page_table(rank % 2 * Shape().heads) for rank in range(4)]


def make(role: InstanceRole, name: str, offset: int = 0, **changes) -> InstanceInfo:
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


# --- the context side


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

    def tell(self, *bodies: PeerBody, stream: int = 1, src=GENERATION.incarnation, dst=CONTEXT.incarnation) -> None:
        self.control.envelope(stream, Envelope(src, dst, bodies), 2.0)


@pytest.fixture
def context() -> ContextSide:
    return ContextSide()


def test_welcome_comes_after_every_rank_has_loaded_the_peer(context: ContextSide):
    context.hello()
    assert context.orders == [(rank, LoadPeer(GENERATION, CONTEXT.ranks, bounce=True)) for rank in (0, 1)]
    context.load(0)
    context.load(0)
    assert context.kinds() == []
    context.load(1)
    (_, said) = context.said[0]
    assert isinstance(said, Welcome)
    assert said.plan_digest == plan_digest(CONTEXT, GENERATION)
    assert context.control.stream_of(("g", GENERATION.incarnation)) == 1
    assert context.control.speaks_to(1) == GENERATION.incarnation


def test_reasons_of_all_ranks_are_told_together(context: ContextSide):
    context.hello()
    for rank in (0, 1):
        context.load(rank, problems=(Incompatibility(f"ranks[{rank}].agent", "a", "b", "c"),))
    (_, said) = context.said[0]
    assert isinstance(said, Reject)
    assert [one.field for one in said.incompatibilities] == ["ranks[0].agent", "ranks[1].agent"]
    assert context.ended == [(1, EndReason.REJECTED)]


@pytest.mark.parametrize("early", [Ping(1), Cancel(RequestKey(1 << 40))])
def test_nothing_is_taken_before_welcome(context: ContextSide, early: PeerBody):
    context.hello()
    with pytest.raises(ProtocolError, match="before Welcome"):
        context.tell(early)


def test_every_envelope_names_both_incarnations(context: ContextSide):
    context.ready()
    context.tell(Ping(5))
    assert context.said == [(1, Pong(5))]
    for wrong in ({"src": b"x" * 16}, {"dst": b"x" * 16}, {"dst": b""}):
        with pytest.raises(ProtocolError, match="incarnations"):
            context.tell(Ping(5), **wrong)


def test_pong_that_crosses_welcome_names_nobody(context: ContextSide):
    context.ready()
    context.tell(Pong(5), dst=b"")
    assert context.ended == []
    with pytest.raises(ProtocolError, match="incarnations"):
        context.tell(Pong(5), dst=b"x" * 16)


def test_hello_twice_or_for_somebody_else_is_refused(context: ContextSide):
    context.ready()
    said = make_hello(GENERATION, limits_of(CONFIG), 2, Dialect())
    with pytest.raises(ProtocolError, match="second Hello"):
        context.tell(said)
    context.control.opened(2, 0.0)
    with pytest.raises(ProtocolError, match="another incarnation"):
        context.control.envelope(2, Envelope(b"x" * 16, b"", (said,)), 0.0)


@pytest.mark.parametrize("body", [Welcome(1, frozenset(), limits_of(CONFIG), CONTEXT, b"", 1)])
def test_messages_for_the_other_side_are_refused(context: ContextSide, body: PeerBody):
    context.ready()
    with pytest.raises(ProtocolError, match="not for a context"):
        context.tell(body)


def test_newer_stream_replaces_and_older_one_does_not(context: ContextSide):
    context.ready(stream=1, epoch=1)
    context.ready(stream=2, epoch=2)
    assert context.ended == [(1, EndReason.REPLACED)]
    # What still comes on the old stream is from the past.
    context.tell(Ping(1), stream=1)
    assert context.kinds() == []
    context.hello(stream=3, epoch=2)
    assert context.ended[-1] == (3, EndReason.REPLACED)
    assert context.control.stream_of(("g", GENERATION.incarnation)) == 2


def test_peer_that_stays_away_is_unloaded(context: ContextSide):
    context.ready()
    context.control.closed(1, 10.0)
    context.orders.clear()
    context.core.tick(10.0 + FORGET_AFTER_S - 1)
    assert context.orders == []
    context.core.tick(10.0 + FORGET_AFTER_S)
    assert context.orders == [(rank, ForgetPeer("g", GENERATION.incarnation)) for rank in (0, 1)]


def test_predecessor_of_a_peer_is_unloaded(context: ContextSide):
    context.ready()
    context.control.closed(1, 10.0)
    successor = dataclasses.replace(GENERATION, incarnation=os.urandom(16))
    context.orders.clear()
    context.ready(stream=2, info=successor)
    assert context.orders[:2] == [(rank, ForgetPeer("g", GENERATION.incarnation)) for rank in (0, 1)]


def test_no_peer_is_loaded_when_a_rank_is_gone(context: ContextSide):
    context.hello()
    context.core.rank_exited(0, "signal 9", 1.0)
    assert context.ended == [(1, EndReason.UNAVAILABLE)]
    context.hello(stream=2, epoch=2)
    assert context.ended[-1] == (2, EndReason.UNAVAILABLE)


def test_silent_stream_is_ended(context: ContextSide):
    context.ready()
    for tenth in range(70):
        context.core.tick(tenth / 10)
    assert context.kinds() == ["Ping"] * 3
    assert context.ended == [(1, EndReason.SILENT)]


# --- the generation side


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

    def welcome(self, said: Hello, info: InstanceInfo = CONTEXT, peer: PeerId = PEER, **changes) -> None:
        terms = answer_hello(info, limits_of(CONFIG), said, Dialect())
        assert not isinstance(terms, tuple)
        body = make_welcome(info, terms, plan_digest(info, GENERATION), said.connection_epoch)
        self.tell(dataclasses.replace(body, **changes), src=info.incarnation, peer=peer)

    def tell(self, *bodies: PeerBody, src=CONTEXT.incarnation, dst=GENERATION.incarnation, peer: PeerId = PEER) -> None:
        self.control.envelope(peer, Envelope(src, dst, bodies), 1.0)

    def ready(self) -> None:
        self.welcome(self.greet())
        assert self.control.is_ready(PEER)


@pytest.fixture
def generation() -> GenerationSide:
    return GenerationSide()


def states(side: GenerationSide) -> list[PairState]:
    return [pair.state for pair in side.control.pairs()]


def test_pair_is_ready_after_welcome(generation: GenerationSide):
    assert states(generation) == [PairState.CONNECTING]
    assert generation.control.speaks_to(PEER) == b""
    generation.ready()
    assert states(generation) == [PairState.READY]
    assert generation.control.speaks_to(PEER) == CONTEXT.incarnation
    generation.control.closed(PEER, 2.0)
    assert states(generation) == [PairState.CONNECTING]
    assert generation.pairs == [PairState.CONNECTING, PairState.READY, PairState.CONNECTING]


def test_every_stream_has_a_higher_epoch(generation: GenerationSide):
    epochs = []
    for _ in range(3):
        epochs.append(generation.greet().connection_epoch)
        generation.control.closed(PEER, 1.0)
    assert epochs == sorted(set(epochs))


def test_reject_is_kept_from_this_sides_view_until_a_welcome_fits(generation: GenerationSide):
    said = generation.greet()
    generation.tell(Reject((Incompatibility("f", "theirs", "ours", "do"),)))
    (pair,) = generation.control.pairs()
    assert pair.state is PairState.INCOMPATIBLE
    assert (pair.incompatibilities[0].mine, pair.incompatibilities[0].yours) == ("ours", "theirs")
    assert generation.ended == [(PEER, EndReason.REJECTED)]
    again = generation.greet()
    assert again.connection_epoch > said.connection_epoch
    assert states(generation) == [PairState.INCOMPATIBLE]
    generation.welcome(again)
    assert states(generation) == [PairState.READY]


def test_other_plan_is_refused_with_a_reject(generation: GenerationSide):
    generation.welcome(generation.greet(), plan_digest=b"other")
    assert generation.kinds() == ["Reject"]
    (pair,) = generation.control.pairs()
    assert [reason.field for reason in pair.incompatibilities] == ["plan_digest"]


def test_welcome_must_answer_this_stream(generation: GenerationSide):
    said = generation.greet()
    with pytest.raises(ProtocolError, match="answers stream"):
        generation.welcome(said, connection_epoch=said.connection_epoch + 1)


def test_incarnations_of_envelopes_are_checked(generation: GenerationSide):
    generation.ready()
    generation.tell(Ping(4))
    assert generation.said == [(PEER, Pong(4))]
    for wrong in ({"src": b"x" * 16}, {"dst": b"x" * 16}):
        with pytest.raises(ProtocolError, match="another incarnation"):
            generation.tell(Ping(4), **wrong)
    with pytest.raises(ProtocolError, match="not for a generation"):
        generation.tell(Cancel(RequestKey(1 << 40)))


def test_endpoint_with_another_incarnation_is_left_alone(generation: GenerationSide):
    successor = dataclasses.replace(CONTEXT, incarnation=os.urandom(16), exited_incarnations=(CONTEXT.incarnation,))
    generation.welcome(generation.greet(), info=successor)
    assert generation.ended == [(PEER, EndReason.UNNEEDED)]
    assert generation.stopped == [PEER]
    assert states(generation) == [PairState.CONNECTING]
    address = PeerAddress("c", successor.incarnation, "c:1")
    generation.control.set_peers([address], 2.0)
    assert generation.started == [ADDRESS, address]
    assert [pair.incarnation for pair in generation.control.pairs()] == [successor.incarnation]
    assert generation.stopped == [PEER]


def test_list_of_peers_replaces(generation: GenerationSide):
    generation.ready()
    generation.control.set_peers([ADDRESS], 2.0)
    assert (len(generation.started), generation.stopped) == (1, [])
    moved = dataclasses.replace(ADDRESS, endpoint="c:2")
    generation.control.set_peers([moved], 2.0)
    assert (generation.started[-1], generation.stopped) == (moved, [PEER])
    assert states(generation) == [PairState.CONNECTING]
    generation.control.set_peers([], 3.0)
    assert generation.control.pairs() == []
    assert generation.stopped == [PEER, PEER]


def test_silent_stream_is_opened_again_and_the_peer_is_not_dead(generation: GenerationSide):
    generation.ready()
    for tenth in range(10, 70):
        generation.core.tick(tenth / 10)
    assert generation.kinds() == ["Ping"] * 3
    assert generation.ended == [(PEER, EndReason.SILENT)]
    assert states(generation) == [PairState.CONNECTING]
    generation.ready()


# --- exits, fences, goodbyes


def test_exit_of_a_rank_is_told_to_every_peer(context: ContextSide):
    context.ready()
    context.core.rank_exited(1, "signal 9", 3.0)
    assert context.said == [(1, ExitReport((1,), "signal 9"))]
    context.said.clear()
    # And to one that comes later: its pages may wait for the proof.
    context.hello(stream=2, epoch=2)
    assert context.said == [(2, ExitReport((1,), "signal 9"))]
    assert context.ended[-1] == (2, EndReason.UNAVAILABLE)


def test_fence_is_answered_with_what_is_known(context: ContextSide):
    context.ready()
    context.tell(FenceWriter((ReceiveKey(RequestKey(1 << 40), 1),), "silent"))
    assert context.kinds() == ["TransferNotice"] * 2
    context.core.rank_exited(0, "signal 9", 3.0)
    context.kinds()
    context.tell(FenceWriter((), "silent"))
    assert context.kinds() == ["ExitReport"]


def test_fence_without_a_stream_proves_what_it_can(context: ContextSide):
    fence = FenceWriter((ReceiveKey(RequestKey(1 << 40), 1),), "silent")
    answer = context.core.fence_asked(CONTEXT.incarnation, ("g", GENERATION.incarnation), fence)
    assert (answer.incarnation, answer.exited_ranks) == (CONTEXT.incarnation, ())
    context.core.rank_exited(1, "signal 9", 3.0)
    answer = context.core.fence_asked(b"x" * 16, ("g", GENERATION.incarnation), fence)
    assert (answer.exited_ranks, answer.notices) == ((1,), ())


def test_goodbye_goes_to_ready_streams_only(context: ContextSide, generation: GenerationSide):
    context.ready()
    context.hello(stream=2, epoch=1, info=make(InstanceRole.GENERATION, "h", 2, incarnation=b"h" * 16))
    context.core.goodbye("stopping")
    assert context.said == [(1, Goodbye("stopping"))]
    generation.ready()
    generation.core.goodbye("stopping")
    assert generation.said[-1] == (PEER, Goodbye("stopping"))


def test_fence_goes_over_the_stream_or_by_a_call(generation: GenerationSide):
    receives = (ReceiveKey(RequestKey(1 << 40), 1),)
    generation.core._emit(Fence(PEER, "c:1", receives, "silent"))
    assert generation.fences == [(PEER, "c:1", FenceWriter(receives, "silent"))]
    generation.ready()
    generation.said.clear()
    generation.core._emit(Fence(PEER, "c:1", receives, "silent"))
    assert generation.said == [(PEER, FenceWriter(receives, "silent"))]
    generation.core._emit(StopInstance("too much"))
    assert generation.stops == ["too much"]


def test_passing_reasons_of_a_rank_are_no_incompatibility(context: ContextSide):
    context.hello()
    context.load(0)
    context.kinds()
    busy = PeerLoaded(
        "g", GENERATION.incarnation, (Incompatibility("ranks[1].agent", "a", "busy", "wait"),), later=True
    )
    context.control.rank_loaded(1, busy, 1.0)
    assert context.kinds() == []
    assert context.ended == [(1, EndReason.UNAVAILABLE)]


def test_exit_report_of_a_successor_says_nothing_about_this_peer(generation: GenerationSide):
    generation.greet()
    generation.tell(ExitReport((0,), "signal 9"), src=b"s" * 16)
    assert generation.ended == []


def test_at_most_so_many_streams_and_those_in_use_stay(generation: GenerationSide, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation.control, "_config", dataclasses.replace(CONFIG, max_peers=2))
    more = [PeerAddress(name, name.encode() * 16, f"{name}:1") for name in "xyz"]
    used = {("z", b"z" * 16): 5.0, PEER: 3.0}
    monkeypatch.setattr(generation.core.receive, "last_used", lambda peer: used.get(peer, float("-inf")))
    generation.control.set_peers([*more, ADDRESS], 1.0)
    assert {pair.instance_id for pair in generation.control.pairs()} == {"z", "c"}
    used[("x", b"x" * 16)] = 9.0
    generation.control.set_peers([*more, ADDRESS], 2.0)
    assert {pair.instance_id for pair in generation.control.pairs()} == {"x", "z"}
    assert generation.stopped == [PEER]


def test_effective_values_are_shown_on_both_sides(context: ContextSide, generation: GenerationSide):
    assert context.core.peers() == generation.core.peers() == []
    context.ready()
    generation.ready()
    (theirs,), (ours,) = context.core.peers(), generation.core.peers()
    assert (theirs.instance_id, ours.instance_id) == ("g", "c")
    assert theirs.limits == ours.limits == limits_of(CONFIG)
    assert theirs.capabilities == ours.capabilities == frozenset(Capability)
