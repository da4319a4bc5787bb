"""Both legs at once, and several answers to one prompt, in vLLM's scheduler: the test as vLLM and as the hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from isthmus_core.generation import FinishReason, Tokens, first_tokens_to_bytes
from kvtransfer.config import OnFailure
from kvtransfer.integrations.vllm.block_lists import rank_groups
from kvtransfer.integrations.vllm.params import DecodeLeg, PrefillLeg, decode_params, prefill_params, read_params
from kvtransfer.integrations.vllm.scheduler import ConnectorScheduler, StepNews
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    Bound,
    CancelTransfer,
    FirstTokensArrived,
    Holder,
    ReceiveIntent,
    ReceiveOutcome,
    ReceiveRequest,
    RequestKey,
    SendOffer,
    SendOutcome,
    TransferFailure,
)
from kvtransfer.transceiver.policy import HandoffPolicy
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

KEY = RequestKey(1 << 50, 2)
HERE = Holder("10.0.0.1:7000", "context-7000", b"i" * 16)
BLOCK = 4
PLAIN: dict[int, Any] = {0: ((0, 1, BLOCK, False),)}
WINDOWED: dict[int, Any] = {0: ((0, 1, BLOCK, False), (1, 1, BLOCK, True))}
BLOCKS = ([5, 6, 7],)


class Request:
    """vLLM's request as far as the connector reads it."""

    def __init__(self, params: dict[str, Any], name: str = "r-0", prompt: int = 10) -> None:
        self.kv_transfer_params, self.request_id = params, name
        self.num_prompt_tokens = self.num_tokens = prompt
        self.num_computed_tokens = 0
        self.name = "FINISHED_LENGTH_CAPPED"
        self.prompt_token_ids, self._all_token_ids = [1] * prompt, [1] * prompt

    def update_block_hashes(self) -> None:
        self.num_tokens = len(self._all_token_ids)

    @property
    def status(self) -> Request:
        return self


class Side:
    """A connector's scheduler, its hub, and the block pool: `pins` counts references."""

    def __init__(self, *, prefills: bool, groups: dict[int, Any] = PLAIN, packs: bool = False) -> None:
        self.said: list[Any] = []
        self.transceiver = SchedulerTransceiver(self, policy=HandoffPolicy(1, OnFailure.RECOMPUTE))
        self.vllm = ConnectorScheduler(self.transceiver, HERE, prefills=prefills, workers=2, packs=packs)
        self.vllm.set_groups(rank_groups(groups))
        self.vllm.set_pins(self)
        self.pins: Counter[int] = Counter()

    def send(self, message: Any) -> None:
        self.said.append(message)

    def pin(self, blocks: Sequence[int]) -> None:
        self.pins.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        self.pins.subtract(blocks)

    def hear(self, *messages: Any) -> StepNews:
        for message in messages:
            self.transceiver.deliver(message)
        return self.vllm.step()

    def computes(self, request: Request, tokens: int, blocks: Any = BLOCKS) -> None:
        """A step of a prompt, on both workers."""
        news = self.vllm.step({request.request_id: tokens}, lambda _: blocks)
        request.num_computed_tokens += tokens
        self.runs(news)

    def runs(self, news: StepNews) -> None:
        for _ in range(2):
            self.vllm.reported(dict.fromkeys(news.pack, 1), news.received)

    def offers(self) -> list[tuple[int, int, list[int], bool]]:
        return [
            (one.tokens.begin, one.tokens.end, one.sources[0].blocks.tolist(), one.more)
            for one in self.said
            if isinstance(one, SendOffer)
        ]


def waited_for(groups: dict[int, Any] = PLAIN, answers: int = 1) -> tuple[Side, Request]:
    side = Side(prefills=True, groups=groups)
    request = Request(prefill_params(PrefillLeg(KEY, answers)))
    side.vllm.new_request(request)
    assert side.vllm.matched_tokens(request, 0) == (0, False)
    side.vllm.allocated(request, BLOCKS, 0)
    assert side.said == [BindContext(KEY)]
    return side, request


def waits(name: str = "r-0", number: int = 0) -> Request:
    return Request(decode_params(DecodeLeg(KEY, HERE, 10, waits=True, answer=number)), name)


def sampled(*tokens: int, ended: tuple[int, ...] = ()) -> FirstTokensArrived:
    reasons = dict.fromkeys(ended, FinishReason.STOP)
    chunks = [Tokens((token,), number, reason=reasons.get(number)) for number, token in enumerate(tokens)]
    return FirstTokensArrived(KEY, first_tokens_to_bytes(chunks))


def comes(name: str, tokens: int = 10) -> Request:
    """An answer to one prompt, with a first token of its own behind it."""
    return Request(decode_params(DecodeLeg(KEY, HERE, tokens)), name, tokens + 1)


def test_a_prompt_goes_in_chunks_while_it_is_computed():
    side, request = waited_for()
    side.computes(request, 5)
    side.computes(request, 1)  # no block more
    side.computes(request, 3)
    side.computes(request, 1)  # the prompt is complete: the last chunk waits for the first token
    assert side.offers() == [(0, 4, [5], True), (4, 8, [5, 6], True)]
    keeps, params = side.vllm.finished(request, BLOCKS)
    assert keeps
    assert read_params(params) == DecodeLeg(KEY, HERE, 10)
    side.runs(side.vllm.step())
    assert side.offers()[2:] == [(8, 10, [5, 6, 7], False)]
    assert +side.pins == Counter({5: 1, 6: 1})
    assert side.hear(SendOutcome(KEY)).sent == {"r-0"}
    assert not +side.pins
    assert side.vllm.is_idle


def test_a_chunk_is_said_when_every_worker_has_run_its_step():
    side, request = waited_for()
    news = side.vllm.step({"r-0": 5}, lambda _: BLOCKS)
    assert news.pack == {("r-0", 0): ((5,),)}
    side.vllm.reported(dict.fromkeys(news.pack, 1), ())
    assert side.offers() == []
    side.vllm.reported(dict.fromkeys(news.pack, 1), ())
    assert len(side.offers()) == 1
    assert request.num_computed_tokens == 0


def test_a_preempted_prompt_keeps_the_blocks_of_its_chunks():
    """It is computed again on other blocks; what was offered is not offered again."""
    side, request = waited_for()
    side.computes(request, 5)
    request.num_computed_tokens = 0
    others = ([8, 9, 3],)
    side.vllm.allocated(request, others, 0)
    assert side.said.count(BindContext(KEY)) == 1
    assert side.pins[5] == 1
    side.computes(request, 8, others)
    assert side.offers() == [(0, 4, [5], True), (4, 8, [8, 9], True)]
    assert +side.pins == Counter({5: 1, 9: 1})


def test_windows_go_when_the_prompt_is_complete():
    side, request = waited_for(WINDOWED)
    side.computes(request, 9, ([5, 6, 7], [1, 2, 3]))
    assert side.offers() == []
    side.vllm.finished(request, ([5, 6, 7], [0, 2, 3]))
    side.runs(side.vllm.step())
    assert [one[:2] for one in side.offers()] == [(0, 9)]


def test_an_abort_withdraws_a_prompt_and_keeps_its_blocks_until_then():
    side, request = waited_for()
    side.computes(request, 5)
    request.name = "FINISHED_ABORTED"
    assert side.vllm.finished(request, BLOCKS) == (True, None)
    assert side.said[-1] == CancelTransfer(KEY)
    assert side.pins[5] == 1
    assert side.hear(SendOutcome(KEY, TransferFailure.CANCELLED)).sent == {"r-0"}
    assert not +side.pins


def test_a_first_token_that_ends_the_answer_is_withdrawn_by_the_worker():
    """After it has told the other leg; of several answers another one may go on, and needs the cache."""
    side, request = waited_for()
    request.name, request.num_computed_tokens = "FINISHED_STOPPED", 10
    assert side.vllm.finished(request, BLOCKS) == (True, None)
    assert side.said == [BindContext(KEY)]
    several, request = waited_for(answers=2)
    request.name, request.num_computed_tokens = "FINISHED_STOPPED", 10
    keeps, params = several.vllm.finished(request, BLOCKS)
    assert keeps
    assert params is not None


def test_a_prompt_that_nobody_wants_any_more_is_not_kept():
    side, request = waited_for()
    side.computes(request, 5)
    assert side.hear(SendOutcome(KEY, TransferFailure.CANCELLED)).sent == set()
    assert not +side.pins
    side.computes(request, 5)
    assert side.vllm.finished(request, BLOCKS) == (False, None)
    assert len(side.offers()) == 1
    assert side.vllm.is_idle


def test_one_of_several_answers_offers_the_prompt():
    side = Side(prefills=True)
    requests = [Request(prefill_params(PrefillLeg(KEY)), f"{number}_r") for number in range(2)]
    for request in requests:
        side.vllm.new_request(request)
        side.vllm.allocated(request, BLOCKS, 0)
        request.num_computed_tokens = 10
    assert side.vllm.finished(requests[0], BLOCKS)[0]
    assert side.vllm.finished(requests[1], BLOCKS) == (False, None)
    assert len(side.offers()) == 1
    assert side.hear(SendOutcome(KEY)).sent == {"0_r"}
    assert side.vllm.is_idle


def loading() -> tuple[Side, Request]:
    """A decode that waits for its prefill without blocks, and then asks for the cache."""
    side, request = Side(prefills=False), waits()
    side.vllm.new_request(request)
    assert side.said == [ReceiveIntent(KEY, HERE)]
    assert side.vllm.matched_tokens(request, 0) == (None, False)
    assert not side.vllm.is_idle
    side.hear(Bound(KEY, 3))
    assert side.vllm.matched_tokens(request, 0) == (10, True)
    side.vllm.allocated(request, BLOCKS, 10)
    wanted = side.said[-1]
    assert isinstance(wanted, ReceiveRequest)
    assert (wanted.holder.dp_rank, wanted.destinations[0].blocks.tolist()) == (3, [5, 6, 7])
    return side, request


@pytest.mark.parametrize("cache_first", [True, False])
def test_a_decode_goes_on_when_the_cache_and_the_first_token_are_there(cache_first: bool):
    side, request = loading()
    arrived = ReceiveOutcome(KEY, settled=True)
    first, then = (arrived, sampled(77)) if cache_first else (sampled(77), arrived)
    assert side.hear(first).received == set()
    assert not side.vllm.is_idle
    assert side.hear(then).received == {"r-0"}
    assert (request.prompt_token_ids[-1], request.num_prompt_tokens, request.num_tokens) == (77, 11, 11)
    assert side.vllm.is_idle


def test_first_tokens_that_come_before_there_are_blocks_lengthen_the_prompt():
    side, request = Side(prefills=False), waits()
    side.vllm.new_request(request)
    side.hear(Bound(KEY, 0), sampled(77))
    assert request.num_tokens == 11
    assert side.vllm.matched_tokens(request, 8) == (2, True)


def test_a_decode_without_a_first_token_is_never_computed():
    """Nobody else would know what its answer begins with."""
    side, requests = Side(prefills=False), [waits("r-0", 0), waits("r-1", 1)]
    for request in requests:
        side.vllm.new_request(request)
    side.hear(Bound(KEY, 0))
    side.vllm.allocated(requests[0], BLOCKS, 10)
    side.hear(ReceiveOutcome(KEY, settled=True))
    side.vllm.finished(requests[0], BLOCKS)  # the worker has heard that its answer is over
    news = side.hear()
    assert news.received == {"r-0"}
    side.runs(news)
    assert side.vllm.matched_tokens(requests[1], 0) == (None, False)
    side.hear(sampled(2, 77, ended=(0,)))
    assert side.vllm.matched_tokens(requests[1], 0) == (0, False)
    assert requests[1].num_tokens == 11
    side.vllm.allocated(requests[1], BLOCKS, 0)
    assert side.vllm.is_idle


def test_an_answer_that_its_first_token_has_ended_is_never_scheduled():
    side, requests = Side(prefills=False), [waits("r-0", 0), waits("r-1", 1)]
    for request in requests:
        side.vllm.new_request(request)
    side.hear(Bound(KEY, 0), sampled(2, 77, ended=(0,)))
    assert side.vllm.matched_tokens(requests[0], 0) == (None, False)
    assert side.vllm.matched_tokens(requests[1], 0) == (10, True)


def test_a_decode_whose_prefill_does_not_come_computes_its_prompt():
    side, request = Side(prefills=False), waits()
    side.vllm.new_request(request)
    side.hear(BindFailed(KEY, TransferFailure.TIMED_OUT, "late"))
    assert side.vllm.matched_tokens(request, 0) == (0, False)
    assert side.vllm.is_idle


def test_an_abort_before_the_prefill_is_scheduled_withdraws_the_intent():
    side, request = Side(prefills=False), waits()
    side.vllm.new_request(request)
    assert side.vllm.finished(request, ([],)) == (False, None)
    assert side.said == [ReceiveIntent(KEY, HERE), CancelTransfer(KEY)]
    assert side.vllm.is_idle


@pytest.mark.parametrize("failed", [False, True])
def test_one_of_several_answers_asks_and_the_others_wait_for_its_blocks(failed: bool):
    side, requests = Side(prefills=False), [comes("r-0"), comes("r-1"), comes("r-2")]
    for request in requests:
        side.vllm.new_request(request)
    assert side.vllm.matched_tokens(requests[0], 0) == (10, True)
    side.vllm.allocated(requests[0], BLOCKS, 10)
    assert side.vllm.matched_tokens(requests[1], 0) == (None, False)
    failure = TransferFailure.WRITE_FAILED if failed else TransferFailure.NONE
    news = side.hear(ReceiveOutcome(KEY, settled=True, failure=failure))
    assert (news.received, news.failed) == ({"r-0"}, {"r-0"} if failed else set())
    # vLLM does not know yet: a look into its prefix cache would find nothing.
    assert side.vllm.matched_tokens(requests[1], 0) == (None, False)
    side.runs(news)
    assert side.vllm.matched_tokens(requests[1], 0) == (0, False)
    for request in requests[1:]:
        side.vllm.allocated(request, BLOCKS, 0)
        assert side.vllm.finished(request, BLOCKS) == (False, None)
    assert [type(one) for one in side.said] == [ReceiveRequest]
    assert side.vllm.is_idle


def test_several_answers_that_leave_the_queue_release_their_holder_once():
    side, requests = Side(prefills=False), [comes("r-0"), comes("r-1")]
    for request in requests:
        side.vllm.new_request(request)
    side.vllm.finished(requests[0], ([],))
    assert side.said == []
    side.vllm.finished(requests[1], ([],))
    (nothing,) = side.said
    assert isinstance(nothing, ReceiveRequest)
    assert len(nothing.tokens) == 0


def test_an_answer_that_was_to_ask_for_all_leaves_and_the_others_go_on():
    """Its blocks were never said to be there: the others compute their prompt."""
    side, requests = Side(prefills=False), [comes("r-0"), comes("r-1")]
    for request in requests:
        side.vllm.new_request(request)
    side.vllm.allocated(requests[0], BLOCKS, 10)
    side.vllm.finished(requests[0], BLOCKS)
    assert side.said[-1] == CancelTransfer(KEY)
    news = side.hear(ReceiveOutcome(KEY, settled=True, failure=TransferFailure.CANCELLED))
    assert news.received == {"r-0"}
    side.runs(news)
    assert side.vllm.matched_tokens(requests[1], 0) == (0, False)
    side.vllm.allocated(requests[1], BLOCKS, 0)
    assert side.vllm.is_idle
