"""Attention dp: one group computes and holds a prompt, one group decodes it; nobody else writes or is waited for."""

from __future__ import annotations

import pytest

from hub_world import NO_TRACING, blocks
from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.ledger import Ledger, PageState
from kvtransfer.messages import KvRequest, TransferLimits
from kvtransfer.peer_plan import build_instance_plans
from kvtransfer.ports import (
    Holder,
    ReceiveOutcome,
    ReceiveRequest,
    SendOffer,
    SendOutcome,
    TokenRange,
    TransferFailure,
    TransferNotice,
    WriteOrder,
)
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.actions import Action, ToRank, ToScheduler
from kvtransfer.session.holders import ReceivePeer
from kvtransfer.session.receive import ReceiveSessions
from kvtransfer.session.transmit import TransmitSessions
from kvtransfer.session.transmit_attempt import TransmitPeer
from session_sides import CONTEXT_CONFIG, DONE, GENERATION_CONFIG, HOLDER_ID, NEVER, PEER, K, said

TOKENS = TokenRange(0, 8)
LIMITS = TransferLimits(8, 100)
# Two groups of one rank each on both sides: every rank has every head.
TABLES = [Storage(Shape(), "slot_major", 8).page_table() for _ in range(4)]
CONTEXT = instance(
    *(rank_info(one, rank, tp=2, dp=2) for rank, one in enumerate(TABLES[:2])), role=InstanceRole.CONTEXT, name="c"
)
GENERATION = instance(*(rank_info(one, rank, tp=2, dp=2) for rank, one in enumerate(TABLES[2:])))
PLANS = build_instance_plans(CONTEXT, GENERATION)
WRITERS = tuple((plan.src_rank, plan.dst_rank) for plan in PLANS)


class Receiver:
    def __init__(self) -> None:
        self.out: list[Action] = []
        self.ledger = Ledger.of(GENERATION.ranks)
        self.sessions = ReceiveSessions(GENERATION_CONFIG, self.ledger, self.out.append, NO_TRACING)
        self.sessions.peer_known(HOLDER_ID)
        self.sessions.stream_ready(HOLDER_ID, ReceivePeer(PLANS, LIMITS, reconciles=True), 0.0)

    def ask(self, src_dp: int, dst_dp: int, rank: int) -> list[Action]:
        holder = Holder("h:1", *HOLDER_ID, dp_rank=src_dp)
        self.sessions.receive(ReceiveRequest(K, TOKENS, blocks(1, 2, rank=rank), holder, dp_rank=dst_dp), 0.0)
        out, self.out[:] = list(self.out), []
        return out


def outcome_of(actions: list[Action]) -> ReceiveOutcome | SendOutcome:
    (outcome,) = [one.message for one in actions if isinstance(one, ToScheduler)]
    assert isinstance(outcome, ReceiveOutcome | SendOutcome)
    return outcome


def test_every_group_may_write_to_every_group():
    assert sorted(WRITERS) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(plan.src_dp, plan.dst_dp) for plan in PLANS] == list(WRITERS)


@pytest.mark.parametrize(("src", "dst"), WRITERS)
def test_only_the_group_that_holds_the_pages_is_asked_and_waited_for(src: int, dst: int):
    receiver = Receiver()
    (asked,) = said(receiver.ask(src, dst, rank=dst))
    assert isinstance(asked, KvRequest)
    assert asked.src_dp == src
    assert receiver.ledger.waiting_for(K) == ((src, dst),)
    (plan,) = [one for one in PLANS if (one.src_rank, one.dst_rank) == (src, dst)]
    notice = TransferNotice(K, src, dst, DONE, plan.extents(TOKENS), receive=asked.receive)
    receiver.sessions.notice(HOLDER_ID, notice, 1.0)
    assert outcome_of(receiver.out).failure is TransferFailure.NONE
    assert receiver.ledger.held()[PageState.EXPOSED] == 0


@pytest.mark.parametrize(("src", "dst", "rank"), [(0, 0, 1), (1, 1, 0), (2, 0, 0), (0, 2, 0)])
def test_a_group_that_does_not_fit_is_refused_before_anything_is_exposed(src: int, dst: int, rank: int):
    receiver = Receiver()
    actions = receiver.ask(src, dst, rank)
    assert said(actions) == []
    outcome = outcome_of(actions)
    assert (outcome.failure, "group" in outcome.reason) == (TransferFailure.WRITE_FAILED, True)
    assert receiver.ledger.is_empty


class Sender:
    def __init__(self, offered: int) -> None:
        self.out: list[Action] = []
        self.sessions = TransmitSessions(CONTEXT_CONFIG, self.out.append, NO_TRACING)
        self.sessions.meet(PEER, TransmitPeer(WRITERS, LIMITS, {1: 1}))
        self.sessions.offer(SendOffer(K, TOKENS, blocks(3, 4, rank=offered), dp_rank=offered), 0.0)

    def request(self, src_dp: int) -> None:
        self.sessions.request(PEER, KvRequest(K, TOKENS, blocks(1, 2), receive=1, src_dp=src_dp), 1.0)


@pytest.mark.parametrize("group", [0, 1])
def test_only_ranks_of_the_group_get_orders(group: int):
    sender = Sender(group)
    sender.request(group)
    orders = [(one.rank, one.message) for one in sender.out if isinstance(one, ToRank)]
    assert [(rank, isinstance(order, WriteOrder)) for rank, order in orders] == [(group, True)]


def test_a_group_that_does_not_hold_the_pages_never_starts():
    sender = Sender(0)
    sender.request(1)
    assert not [one for one in sender.out if isinstance(one, ToRank)]
    (notice,) = said(sender.out)
    assert isinstance(notice, TransferNotice)
    assert (notice.src_rank, notice.outcome) == (1, NEVER)
    assert "group 0 holds" in notice.reason
    assert outcome_of(sender.out).failure is TransferFailure.WRITE_FAILED


def test_a_group_that_does_not_exist_is_against_the_protocol():
    with pytest.raises(ProtocolError, match="group 7"):
        Sender(0).request(7)


def test_chunks_of_one_attempt_come_from_one_group():
    sender = Sender(0)
    key = type(K)(K.request_id, 9)
    sender.sessions.offer(SendOffer(key, TokenRange(0, 4), blocks(3), more=True, dp_rank=1), 0.0)
    with pytest.raises(TransferStateError, match="group 0 comes after 1 of group 1"):
        sender.sessions.offer(SendOffer(key, TokenRange(4, 8), blocks(3, 4), 1), 0.0)


def test_a_bound_attempt_belongs_to_the_group_that_computes_it():
    sender = Sender(0)
    key = type(K)(K.request_id, 9)
    sender.sessions.prepare(key, 0.0, 1)
    with pytest.raises(TransferStateError, match="of group 1"):
        sender.sessions.offer(SendOffer(key, TOKENS, blocks(3, 4), 1), 0.0)
