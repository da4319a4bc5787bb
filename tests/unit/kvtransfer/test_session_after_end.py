"""What a context instance says of attempts that are over."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import Tracing
from kvtransfer.config import TransferConfig
from kvtransfer.messages import KvRequest, ReceiveKey, ReconcileReply, TransferLimits
from kvtransfer.ports import RankBlocks, RequestKey, SendOffer, TokenRange, TransferNotice, WriteOrder, WriterOutcome
from kvtransfer.session.actions import Action, ToPeer, ToRank
from kvtransfer.session.transmit import TransmitSessions
from kvtransfer.session.transmit_attempt import TransmitPeer

KEY = RequestKey(1 << 40)
PEER = ("generation-0", b"g" * 16)
TOKENS = TokenRange(0, 8)


class World:
    """Sessions of one rank that know one peer; `said` is what the peer was told last."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.receive = 0
        tracing = Tracing.from_config(TelemetryConfig(), "test")
        self.sessions = TransmitSessions(TransferConfig("nixl", drain_s=0.0), self.actions.append, tracing)
        self.sessions.meet(PEER, TransmitPeer(((0, 0),), TransferLimits(8, 64)))

    def offer(self) -> None:
        self.sessions.offer(SendOffer(KEY, TOKENS, (RankBlocks(0, 0, np.arange(2, dtype=np.int32)),)), 0.0)

    def request(self, first: int = 0) -> None:
        self.receive += 1
        blocks = RankBlocks(0, 0, np.arange(first, first + 2, dtype=np.int32))
        self.sessions.request(PEER, KvRequest(KEY, TOKENS, (blocks,), receive=self.receive), 1.0)

    def deliver(self) -> None:
        self.sessions.notice(0, TransferNotice(KEY, 0, 0, WriterOutcome.DELIVERED, receive=self.receive), 2.0)

    @property
    def orders(self) -> int:
        return sum(isinstance(one, ToRank) and isinstance(one.message, WriteOrder) for one in self.actions)

    @property
    def said(self) -> TransferNotice | ReconcileReply:
        message = [one.message for one in self.actions if isinstance(one, ToPeer)][-1]
        assert isinstance(message, TransferNotice | ReconcileReply)
        return message


@pytest.fixture(name="world")
def _world() -> World:
    return World()


def test_an_old_delivery_is_no_answer_to_a_new_request(world: World):
    world.offer()
    world.request()
    world.deliver()
    assert isinstance(world.said, TransferNotice)
    assert world.said.outcome is WriterOutcome.DELIVERED
    # The peer has freed those pages; what it asks for now are others, or the same with other contents.
    world.request(first=4)
    notice = world.said
    assert isinstance(notice, TransferNotice)
    assert notice.outcome is WriterOutcome.NEVER_STARTED
    assert notice.not_held
    world.sessions.reconcile(PEER, [ReceiveKey(KEY, world.receive)], 3.0)
    assert world.said == ReconcileReply((), (notice,))
    assert world.orders == 1


def test_a_key_can_be_offered_and_asked_for_again(world: World):
    for _ in range(2):
        world.offer()
        world.request()
        world.deliver()
        assert isinstance(world.said, TransferNotice)
        assert world.said.outcome is WriterOutcome.DELIVERED
    assert world.orders == 2


def test_reconcile_still_gets_the_recorded_delivery(world: World):
    world.offer()
    world.request()
    world.deliver()
    delivered = world.said
    world.sessions.reconcile(PEER, [ReceiveKey(KEY, world.receive)], 3.0)
    assert world.said == ReconcileReply((), (delivered,))


def test_pages_that_died_with_their_rank_did_not_expire(world: World):
    world.offer()
    world.sessions.rank_exited(0, "killed", 0.5)
    world.request()
    assert isinstance(world.said, TransferNotice)
    assert world.said.outcome is WriterOutcome.NEVER_STARTED
    assert not world.said.not_held
    assert "killed" in world.said.reason
