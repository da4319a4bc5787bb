"""generation_first in the scheduler: intent, bind, chunks while the prefill goes on, first tokens over the stream."""

from __future__ import annotations

import pytest

from isthmus_core.errors import Overloaded, RequestCancelled, TransferFailed
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.ports import (
    BindFailed,
    Bound,
    ReceiveRequest,
    SendFirstTokens,
    SendOffer,
    TransferFailure,
)
from kvtransfer.transceiver.policy import HandoffPolicy
from mock_oracle import oracle
from sched_bench import Bench
from sched_pair import Pair
from sched_three import HOT, PROMPT, check_text, first_sampled


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 37, 64])
def test_text_is_that_of_one_instance(length: int):
    prompt = [32 + index * 7 % 95 for index in range(length)]
    pair = Pair()
    key = pair.submit(prompt, 9)
    pair.run()
    assert pair.text(key) == oracle(prompt, 9)
    assert isinstance(pair.context.trails[key].end, ContextDone)
    end = pair.generation.trails[key].end
    assert isinstance(end, RequestFinished)
    assert end.error is None
    pair.check_idle()


def test_every_step_of_the_prefill_offers_the_blocks_that_it_has_filled():
    pair = Pair(max_batch_tokens=10)
    pair.submit(PROMPT, 9)
    pair.run()
    offers = [one for one in pair.context.messages(SendOffer) if isinstance(one, SendOffer)]
    ranges = [(one.tokens.begin, one.tokens.end, one.more) for one in offers]
    assert ranges == [(0, 8, True), (8, 20, True), (20, 28, True), (28, 37, False)]
    kinds = [type(one) for one in pair.context.log if isinstance(one, SendOffer | SendFirstTokens)]
    assert kinds[-2:] == [SendFirstTokens, SendOffer], "who has the whole cache can count on the first tokens"
    pair.check_idle()


def test_chunks_are_written_before_the_prefill_is_over():
    pair = Pair(max_batch_tokens=10)
    key = pair.submit(PROMPT, 9)
    for _ in range(3):
        pair.turn()
    assert pair.wires[key].copied >= 1
    assert pair.context.trails[key].end is None
    pair.run()
    pair.check_idle()


def test_what_the_context_instance_has_already_is_offered_before_anything_is_computed():
    pair = Pair(max_batch_tokens=10)
    pair.submit(PROMPT, 2)
    pair.run()
    key = pair.submit(PROMPT, 9)
    pair.context.step()
    offers = [one for one in pair.context.messages(SendOffer) if one.key == key]
    assert isinstance(offers[0], SendOffer)
    assert (offers[0].tokens.begin, offers[0].tokens.end) == (0, 36)
    pair.run()
    assert pair.text(key) == oracle(PROMPT, 9)
    pair.check_idle()


@pytest.mark.parametrize("length", [1, 4, 17, 64])
def test_text_is_the_same_with_pages_that_are_reserved_early(length: int):
    prompt = [32 + index * 7 % 95 for index in range(length)]
    pair = Pair(reserve_early=True)
    keys = [pair.submit(prompt, 9) for _ in range(3)]
    pair.run()
    for key in keys:
        assert pair.text(key) == oracle(prompt, 9)
    pair.check_idle()


def test_pages_can_be_reserved_before_the_context_leg_is_scheduled():
    generation = Bench("generation", reserve_early=True)
    key = generation.submit(PROMPT, 9, at_once=True)
    generation.run()
    assert generation.scheduler.load().used_blocks == 10
    assert not generation.messages(ReceiveRequest), "nobody could write them yet"
    generation.transceiver.deliver(Bound(key, 3))
    generation.run()
    (asked,) = generation.messages(ReceiveRequest)
    assert isinstance(asked, ReceiveRequest)
    assert asked.holder.dp_rank == 3
    generation.abort(key)
    generation.deliver_receive(key, TransferFailure.CANCELLED)
    generation.run()
    generation.check_idle()


def test_reserved_pages_come_back_when_the_leg_is_dropped_or_never_bound():
    generation = Bench("generation", reserve_early=True)
    dropped, unbound = (generation.submit(PROMPT, 9, at_once=True) for _ in range(2))
    generation.run()
    assert generation.scheduler.load().used_blocks == 20
    generation.abort(dropped)
    generation.transceiver.deliver(BindFailed(unbound, TransferFailure.PEER_LOST, "gone"))
    generation.run()
    assert not generation.messages(ReceiveRequest)
    generation.check_idle()


def test_a_leg_that_is_bound_while_it_queues_for_pages_asks_when_it_has_them():
    generation = Bench("generation", reserve_early=True, num_blocks=16)
    first, second = (generation.submit(PROMPT, 9, at_once=True) for _ in range(2))
    generation.run()
    assert generation.scheduler.load().used_blocks == 10
    generation.transceiver.deliver(Bound(second, 0))
    generation.run()
    assert not generation.messages(ReceiveRequest)
    generation.abort(first)
    generation.run()
    (asked,) = generation.messages(ReceiveRequest)
    assert isinstance(asked, ReceiveRequest)
    assert asked.key == second
    generation.abort(second)
    generation.deliver_receive(second, TransferFailure.CANCELLED)
    generation.run()
    generation.check_idle()


def test_no_page_is_taken_before_the_context_leg_is_scheduled():
    generation = Bench("generation")
    key = generation.submit(PROMPT, 9, at_once=True)
    generation.run()
    load = generation.scheduler.load()
    assert (load.used_blocks, load.waiting_requests, load.running_requests) == (0, 1, 0)
    generation.transceiver.deliver(Bound(key, 0))
    generation.run()
    assert len(generation.messages(ReceiveRequest)) == 1
    assert generation.scheduler.load().used_blocks == 10
    generation.abort(key)
    generation.deliver_receive(key, TransferFailure.CANCELLED)
    generation.run()
    generation.check_idle()


def test_three_answers_and_one_hand_off():
    pair = Pair(num_blocks=64)
    key = pair.submit(PROMPT, 9, **HOT)
    pair.run()
    check_text(pair, key)
    assert len(pair.generation.messages(ReceiveRequest)) == 1
    pair.check_idle()


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_an_answer_that_ends_with_its_first_token_leaves_the_others_alone(ended: int):
    stop = (first_sampled()[ended],)
    pair = Pair(num_blocks=64)
    key = pair.submit(PROMPT, 9, stop=stop, **HOT)
    pair.run()
    check_text(pair, key, stop)
    pair.check_idle()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("write", [True, False])
def test_nothing_is_handed_off_when_the_first_tokens_end_every_answer(n: int, write: bool):
    pair = Pair(num_blocks=64, max_batch_tokens=10, write=write)
    key = pair.submit(PROMPT, 1, n=n)
    pair.run()
    assert len(pair.text(key)) == 1
    assert not pair.generation.trails[key].answers
    for side in (pair.context, pair.generation):
        end = side.trails[key].end
        assert isinstance(end, RequestFinished)
        assert end.error is None
    assert end.report.handoff is None
    pair.check_idle()


@pytest.mark.parametrize("side", ["context", "generation", "both"])
@pytest.mark.parametrize("turns", range(14))
@pytest.mark.parametrize("write", [True, False])
def test_a_leg_that_is_dropped_at_any_moment_leaves_nothing_on_either_side(side: str, turns: int, write: bool):
    pair = Pair(max_batch_tokens=10, write=write)
    key = pair.submit(PROMPT, 6)
    for _ in range(turns):
        pair.turn()
    for bench in (pair.context, pair.generation):
        if side in ("both", bench.role):
            bench.abort(key)
    pair.run()
    # The router ends the leg whose partner has gone.
    for bench in (pair.context, pair.generation):
        bench.abort(key)
    pair.run()
    pair.check_idle()


def test_a_context_leg_that_goes_away_ends_the_leg_that_waits_for_it():
    pair = Pair(max_batch_tokens=10)
    key = pair.submit(PROMPT, 6)
    pair.turn()
    pair.context.abort(key)
    pair.run()
    assert isinstance(pair.generation.trails[key].end.error, TransferFailed)
    assert isinstance(pair.context.trails[key].end.error, RequestCancelled)
    pair.check_idle()


def test_a_generation_leg_that_goes_away_ends_the_prefill():
    pair = Pair(max_batch_tokens=10)
    key = pair.submit(PROMPT, 6)
    pair.turn()
    pair.generation.abort(key)
    pair.run()
    assert isinstance(pair.context.trails[key].end.error, TransferFailed)
    assert len(pair.context.rows) < 4
    pair.check_idle()


def test_logits_that_are_not_finite_end_both_legs():
    pair = Pair(max_batch_tokens=10)
    pair.context = Bench("context", max_batch_tokens=10, poison=200)
    pair._read[id(pair.context)] = 0
    key = pair.submit([*PROMPT, 200], 6)
    pair.run()
    assert "not finite" in pair.context.trails[key].end.error.message
    assert isinstance(pair.generation.trails[key].end.error, TransferFailed)
    pair.check_idle()


def test_legs_that_wait_count_in_the_queue():
    generation = Bench("generation", max_waiting=2)
    keys = [generation.submit(PROMPT, 9, at_once=True) for _ in range(2)]
    with pytest.raises(Overloaded):
        generation.submit(PROMPT, 9, at_once=True)
    for key in keys:
        generation.abort(key)
    generation.check_idle()


def test_legs_queue_by_age_whoever_is_bound_first():
    generation = Bench("generation", num_blocks=11)
    old, young = (generation.submit(PROMPT, 2, at_once=True) for _ in range(2))
    generation.transceiver.deliver(Bound(young, 0))
    generation.transceiver.deliver(Bound(old, 0))
    generation.run()
    assert [one.key for one in generation.messages(ReceiveRequest)] == [old]
    for key in (old, young):
        generation.abort(key)
    generation.deliver_receive(old, TransferFailure.CANCELLED)
    generation.run()
    generation.check_idle()


def test_blocks_that_are_offered_during_the_prefill_are_held_once():
    context = Bench("context", max_batch_tokens=10, policy=HandoffPolicy(max_held_blocks=20), prefix_caching=False)
    first = context.submit(PROMPT, 9, at_once=True)
    context.step()
    second = context.submit(PROMPT, 9, at_once=True)
    context.step()
    assert context.scheduler.load().running_requests == 2
    for key in (first, second):
        context.abort(key)
        context.deliver_send(key, TransferFailure.CANCELLED)
    context.run()
    context.check_idle()
