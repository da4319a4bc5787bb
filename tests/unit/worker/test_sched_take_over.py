"""generation_first, and the context leg is lost: the generation leg computes the prompt itself, or says why not."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_core.errors import TransferFailed
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import Sampling
from isthmus_worker.scheduler import RequestFinished
from kvtransfer.config import OnFailure
from kvtransfer.ports import BindFailed, Bound, ReceiveRequest, TransferFailure
from kvtransfer.transceiver.policy import HandoffPolicy
from mock_oracle import oracle
from sched_bench import Bench
from sched_pair import Pair

PROMPT = [32 + index * 7 % 95 for index in range(37)]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 3}
RECOMPUTE = HandoffPolicy(retries=1, on_failure=OnFailure.RECOMPUTE)
FAIL = HandoffPolicy(retries=1, on_failure=OnFailure.FAIL)


def make_pair(policy: HandoffPolicy = RECOMPUTE, **options: Any) -> Pair:
    """Whose generation legs may go on alone; steps of ten tokens."""
    return Pair(
        policy=policy, **{"may_take_over": True, "num_blocks": 64, "max_batch_tokens": 10, "max_running": 8, **options}
    )


def check_alone(pair: Pair, key: RequestKey) -> None:
    """The three answers are the model's, all of them said by the generation leg."""
    trail = pair.generation.trails[key]
    assert trail.took_over
    assert isinstance(trail.end, RequestFinished)
    assert trail.end.error is None
    assert trail.end.report.recomputed
    assert trail.took_over in trail.end.report.handoff_failures
    for sample in range(3):
        assert trail.answers[sample] == oracle(PROMPT, 9, sampling=Sampling(9, **HOT), sample=sample), sample


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_a_context_leg_that_is_cancelled_in_its_prefill_is_made_good(turns: int, write: bool, early: bool):
    pair = make_pair(write=write, reserve_early=early)
    key = pair.submit(PROMPT, 9, **HOT)
    for _ in range(turns):
        pair.turn()
    assert pair.wires[key].first is None, "the prefill still runs"
    pair.context.abort(key)
    pair.run()
    check_alone(pair, key)
    pair.check_idle()


def test_logits_that_are_not_finite_are_the_context_instances_own():
    pair = make_pair()
    pair.context = Bench("context", max_batch_tokens=10, poison=PROMPT[-1])
    pair._read[id(pair.context)] = 0
    key = pair.submit(PROMPT, 9, **HOT)
    pair.run()
    assert "not finite" in pair.context.trails[key].end.error.message
    check_alone(pair, key)
    pair.check_idle()


@pytest.mark.parametrize(("policy", "allowed"), [(FAIL, True), (RECOMPUTE, False)])
def test_it_ends_with_the_reason_where_nobody_wants_that(policy: HandoffPolicy, allowed: bool):
    pair = make_pair(policy, may_take_over=allowed)
    key = pair.submit(PROMPT, 9)
    pair.turn()
    pair.context.abort(key)
    pair.run()
    trail = pair.generation.trails[key]
    assert trail.took_over is None
    assert isinstance(trail.end.error, TransferFailed)
    pair.check_idle()


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_a_leg_that_queues_for_pages_is_computed_when_it_has_them(early: bool, bound: bool):
    generation = Bench("generation", num_blocks=16, policy=RECOMPUTE, may_take_over=True, reserve_early=early)
    first, second = (generation.submit(PROMPT, 9, at_once=True) for _ in range(2))
    generation.transceiver.deliver(Bound(first, 0))
    generation.run()
    if bound:
        generation.transceiver.deliver(Bound(second, 0))
        generation.run()
    generation.transceiver.deliver(BindFailed(second, TransferFailure.TIMED_OUT, "not bound"))
    generation.run()
    assert generation.trails[second].took_over == "not bound"
    assert not generation.trails[second].answers
    generation.abort(first)
    generation.deliver_receive(first, TransferFailure.CANCELLED)
    generation.run()
    assert generation.trails[second].tokens == oracle(PROMPT, 9)
    assert [one.key for one in generation.messages(ReceiveRequest)] == [first]
    generation.check_idle()


@pytest.mark.parametrize("retry", [True, False])
@pytest.mark.parametrize("settled", [True, False])
def test_what_was_asked_for_has_its_own_end(settled: bool, retry: bool):
    generation = Bench("generation", num_blocks=64, policy=RECOMPUTE, may_take_over=True)
    key = generation.submit(PROMPT, 9, at_once=True)
    generation.transceiver.deliver(Bound(key, 0))
    generation.run()
    generation.transceiver.deliver(BindFailed(key, TransferFailure.NOT_HELD, "withdrawn"))
    generation.run()
    assert not generation.trails[key].answers, "pages that a peer may still write are nobody's yet"
    generation.deliver_receive(key, TransferFailure.WRITE_FAILED, settled=settled, may_retry=retry and settled)
    generation.run()
    assert generation.trails[key].tokens == oracle(PROMPT, 9)
    assert len(generation.messages(ReceiveRequest)) == 1, "there is nobody to ask again"
    assert generation.cancels(key) == (retry and settled), "a holder that keeps its pages is told"
    if not settled:
        assert not generation.trails[key].released
        generation.deliver_receive(key, TransferFailure.WRITE_FAILED)
        generation.run()
    generation.check_idle()


@pytest.mark.parametrize("arrives_first", [True, False])
def test_a_whole_cache_without_its_first_tokens_is_used(arrives_first: bool):
    pair = make_pair(write=arrives_first)
    key = pair.submit(PROMPT, 9, **HOT)
    while pair.wires[key].first is None:
        pair.wires[key].intent = pair.wires[key].intent and not pair.wires[key].told_bound  # they are lost on the way
        pair.turn()
    if arrives_first:
        pair.run()
    pair.generation.transceiver.deliver(BindFailed(key, TransferFailure.TIMED_OUT, "no first token"))
    pair.generation.step()
    pair.write = True
    steps = len(pair.generation.rows)
    pair.run()
    check_alone(pair, key)
    assert len(pair.generation.rows) - steps <= 10, "only the last tokens of the prompt were computed again"
    pair.check_idle()
