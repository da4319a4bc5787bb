"""The connector's side in vLLM's scheduler, with the test as vLLM and as the hub."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtransfer.config import OnFailure
from kvtransfer.integrations.vllm.block_lists import rank_groups
from kvtransfer.integrations.vllm.params import (
    DecodeLeg,
    ParamsInvalid,
    PrefillLeg,
    decode_params,
    draw_key,
    prefill_params,
    read_params,
)
from kvtransfer.integrations.vllm.scheduler import ConnectorScheduler
from kvtransfer.ports import (
    CancelTransfer,
    Holder,
    ReceiveOutcome,
    ReceiveRequest,
    RequestKey,
    SendOffer,
    SendOutcome,
    TraceContext,
    TransferFailure,
)
from kvtransfer.transceiver.policy import HandoffPolicy
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

KEY = RequestKey(1 << 50, 2)
HERE = Holder("10.0.0.1:7000", "context-7000", b"i" * 16)
BLOCK = 4
# One rank, one group of whole attention.
PLAIN = {0: ((0, 1, BLOCK, False),)}


@dataclass
class Request:
    """vLLM's request as far as the connector reads it."""

    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 10
    request_id: str = "r-1"
    num_computed_tokens: int = 10
    outcome: str = "FINISHED_LENGTH_CAPPED"
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens or self.num_prompt_tokens

    @property
    def status(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.outcome)


@dataclass
class World:
    prefills: bool = False
    policy: HandoffPolicy = field(default_factory=lambda: HandoffPolicy(1, OnFailure.RECOMPUTE))
    groups: dict[int, Any] = field(default_factory=lambda: dict(PLAIN))

    def __post_init__(self) -> None:
        self.said: list[Any] = []
        self.transceiver = SchedulerTransceiver(self, policy=self.policy)
        self.side = ConnectorScheduler(self.transceiver, HERE, prefills=self.prefills)
        self.side.set_groups(rank_groups(self.groups))

    def send(self, message: Any) -> None:
        """As the port to the hub."""
        self.said.append(message)

    def hear(self, *messages: Any) -> tuple[set[str], set[str], set[str]]:
        for message in messages:
            self.transceiver.deliver(message)
        news = self.side.step()
        return news.sent, news.received, news.failed

    def load(self, request: Request, blocks: Any = ([5, 6, 7],), computed: int = 0) -> ReceiveRequest:
        """A decode request up to what the hub is asked."""
        self.side.new_request(request)
        external, asynchronous = self.side.matched_tokens(request, computed)
        assert asynchronous
        self.side.allocated(request, blocks, external)
        wanted = self.said[-1]
        assert isinstance(wanted, ReceiveRequest)
        return wanted


def decode(tokens: int = 10, **fields: Any) -> Request:
    return Request(decode_params(DecodeLeg(KEY, HERE, tokens)), **fields)


def arrived() -> ReceiveOutcome:
    return ReceiveOutcome(KEY, settled=True)


def failed(*, settled: bool = True, may_retry: bool = False) -> ReceiveOutcome:
    failure = TransferFailure.WRITE_FAILED
    return ReceiveOutcome(KEY, settled=settled, failure=failure, reason="broken", may_retry=may_retry)


def test_a_prefill_keeps_its_blocks_until_they_are_fetched():
    world = World(prefills=True)
    request = Request(prefill_params(PrefillLeg(KEY)))
    world.side.new_request(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    keeps, params = world.side.finished(request, ([8, 3, 9],))
    assert keeps
    assert read_params(params) == DecodeLeg(KEY, HERE, 10)
    (offer,) = world.said
    assert isinstance(offer, SendOffer)
    assert (offer.tokens.begin, offer.tokens.end) == (0, 10)
    assert offer.sources[0].blocks.tolist() == [8, 3, 9]
    assert world.hear() == (set(), set(), set())
    assert not world.side.is_idle
    assert world.hear(SendOutcome(KEY)) == ({"r-1"}, set(), set())
    assert world.side.is_idle


@pytest.mark.parametrize("outcome", ["FINISHED_STOPPED", "FINISHED_ABORTED"])
def test_a_prefill_that_needs_no_decode_keeps_nothing(outcome):
    world = World(prefills=True)
    request = Request(prefill_params(PrefillLeg(KEY)), outcome=outcome)
    world.side.new_request(request)
    assert world.side.finished(request, ([8, 3, 9],)) == (False, None)
    assert world.said == []
    assert world.side.is_idle


def test_a_decode_asks_for_what_it_does_not_have():
    world = World()
    wanted = world.load(decode(num_tokens=11), computed=4)
    assert (wanted.key, wanted.holder) == (KEY, HERE)
    assert (wanted.tokens.begin, wanted.tokens.end) == (4, 10)
    assert [(one.blocks.tolist(), one.begin) for one in wanted.destinations] == [([6, 7], 4)]
    assert world.hear(arrived()) == (set(), {"r-1"}, set())
    assert world.side.is_idle


def test_blocks_of_kernels_windows_and_ranks():
    facts = {0: ((0, 2, 2, False), (1, 1, BLOCK, True)), 1: ((1, 1, BLOCK, True),)}
    world = World(groups=facts)
    wanted = world.load(decode(), ([5, 6, 7], [0, 0, 9]))
    listed = [(one.rank, one.layer_group, one.blocks.tolist()) for one in wanted.destinations]
    assert listed == [(0, 0, [10, 11, 12, 13, 14]), (0, 1, [-1, -1, 9]), (1, 0, [-1, -1, 9])]


def test_a_failed_load_is_told_when_no_peer_can_write_any_more():
    world = World(policy=HandoffPolicy(0, OnFailure.RECOMPUTE))
    world.load(decode())
    assert world.hear(failed(settled=False)) == (set(), set(), set())
    assert world.hear(failed()) == (set(), {"r-1"}, {"r-1"})
    assert world.side.is_idle


def test_a_failed_load_is_asked_for_once_more():
    world = World()
    world.load(decode())
    assert world.hear(failed(may_retry=True)) == (set(), set(), set())
    assert [type(one) for one in world.said] == [ReceiveRequest, ReceiveRequest]
    assert world.hear(failed()) == (set(), {"r-1"}, {"r-1"})
    assert len(world.said) == 2


def test_an_aborted_load_keeps_its_blocks_until_it_is_settled():
    world = World()
    request = decode()
    world.load(request)
    request.outcome = "FINISHED_ABORTED"
    assert world.side.finished(request, ([5, 6, 7],)) == (False, None)
    assert world.said[-1] == CancelTransfer(KEY)
    cancelled = ReceiveOutcome(KEY, settled=True, failure=TransferFailure.CANCELLED)
    assert world.hear(cancelled) == (set(), {"r-1"}, {"r-1"})
    assert world.side.is_idle


@pytest.mark.parametrize("scheduled", [True, False])
def test_a_holder_of_what_is_not_needed_is_told(scheduled):
    """Everything was in the prefix cache, or the request was aborted in the queue."""
    world = World()
    request = decode()
    world.side.new_request(request)
    if scheduled:
        assert world.side.matched_tokens(request, 12) == (0, False)
        world.side.allocated(request, ([5, 6, 7],), 0)
    else:
        request.outcome = "FINISHED_ABORTED"
        assert world.side.finished(request, ([],)) == (False, None)
    (nothing,) = world.said
    assert isinstance(nothing, ReceiveRequest)
    assert len(nothing.tokens) == 0
    assert not world.side.is_idle
    assert world.hear(arrived()) == (set(), set(), set())
    assert world.side.is_idle


def test_a_preempted_decode_computes_its_prompt():
    world = World()
    request = decode()
    world.load(request)
    world.hear(arrived())
    assert world.side.matched_tokens(request, 0) == (0, False)
    world.side.allocated(request, ([5, 6, 7],), 0)
    assert len(world.said) == 1


def test_a_request_for_the_other_role_is_computed_as_if_it_were_none(caplog):
    world = World()
    request = Request(prefill_params(PrefillLeg(KEY)))
    world.side.new_request(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert world.side.finished(request, ([1],)) == (False, None)
    assert world.said == []
    assert "is for a prefill" in caplog.text


def test_a_state_is_not_taken_one_token_back(caplog):
    world = World(groups={0: ((0, 1, 0, False),)})
    request = decode()
    world.side.new_request(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert "one token back" in caplog.text
    longer = decode(num_tokens=11, request_id="r-2")
    assert world.load(longer, ([7, 8],)).destinations[0].blocks.tolist() == [7]


def test_parameters_come_back_as_they_went():
    leg = DecodeLeg(KEY, Holder("h:1", "x", b"z" * 16, 3), 77, TraceContext(b"t" * 16, b"s" * 8, 1))
    assert read_params(decode_params(leg)) == leg
    assert read_params(prefill_params(PrefillLeg(KEY))) == PrefillLeg(KEY)
    assert read_params(prefill_params(PrefillLeg(KEY, 2))) == PrefillLeg(KEY, 2)
    waiting = DecodeLeg(KEY, HERE, 77, waits=True)
    assert read_params(decode_params(waiting)) == waiting
    drawn = read_params({"do_remote_decode": True})
    assert isinstance(drawn, PrefillLeg)
    assert drawn.key != draw_key()
    for nothing in (None, {}, {"do_remote_decode": False, "other": 1}):
        assert read_params(nothing) is None


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("tokens", 0),
        ("tokens", "10"),
        ("request", 5),
        ("request", "5.0"),
        ("request", f"{1 << 50}"),
        ("endpoint", ""),
        ("instance_id", None),
        ("incarnation", "zz"),
        ("incarnation", "00"),
        ("dp_rank", -1),
    ],
)
def test_parameters_that_make_no_sense_are_named(field_name, value):
    params = {**decode_params(DecodeLeg(KEY, HERE, 10)), field_name: value}
    with pytest.raises(ParamsInvalid, match=field_name):
        read_params(params)


def test_wrong_parameters_lead_to_a_computed_prompt(caplog):
    world = World()
    request = Request({"do_remote_prefill": True})
    world.side.new_request(request)
    assert world.side.matched_tokens(request, 0) == (0, False)
    assert "kv_transfer_params.tokens" in caplog.text


def test_block_lists_are_int32():
    assert World().load(decode()).destinations[0].blocks.dtype == np.int32
