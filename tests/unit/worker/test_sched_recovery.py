"""Hand-offs that fail: once more on fresh pages, then the prompt is computed at the generation; caps on held pages."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_core.errors import TransferFailed
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase, Sampling
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.config import OnFailure
from kvtransfer.ports import CancelTransfer, ReceiveRequest, SendOffer, TransferFailure
from kvtransfer.transceiver.policy import HandoffPolicy
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, copy_cache

PROMPT = [32 + index * 7 % 95 for index in range(37)]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 3}
RECOMPUTE = HandoffPolicy(retries=1, on_failure=OnFailure.RECOMPUTE)
FAIL = HandoffPolicy(retries=1, on_failure=OnFailure.FAIL)
FAILED = TransferFailure.WRITE_FAILED


def split(
    policy: HandoffPolicy, *, num_blocks: int = 64, stop: tuple[int, ...] = ()
) -> tuple[Bench, Bench, RequestKey]:
    """A request with three answers whose cache is on its way."""
    context = Bench("context", num_blocks=64)
    generation = Bench("generation", num_blocks=num_blocks, policy=policy)
    key = context.submit(PROMPT, 9, stop=stop, **HOT)
    context.run()
    done = context.trails[key].end
    assert isinstance(done, ContextDone)
    phase = ContextPhase(key, done.first_tokens, len(PROMPT), HOLDER)
    generation.submit(PROMPT, 9, key=key, phase=phase, stop=stop, **HOT)
    generation.run()
    return context, generation, key


def check_text(context: Bench, generation: Bench, key: RequestKey) -> None:
    """Every answer is the model's."""
    for sample in range(3):
        text = [*context.trails[key].answers[sample], *generation.trails[key].answers[sample]]
        assert text == oracle(PROMPT, 9, sampling=Sampling(9, **HOT), sample=sample)


def report(bench: Bench, key: RequestKey):
    end = bench.trails[key].end
    assert isinstance(end, RequestFinished)
    return end.report


def destinations(bench: Bench) -> list[set[int]]:
    """Blocks of every receive, in order."""
    asked = [one for one in bench.messages(ReceiveRequest) if isinstance(one, ReceiveRequest)]
    return [set(one.destinations[0].blocks.tolist()) for one in asked]


def test_a_failed_receive_is_repeated_on_fresh_pages():
    context, generation, key = split(RECOMPUTE)
    generation.deliver_receive(key, FAILED, may_retry=True)
    generation.run()
    first, second = destinations(generation)
    assert not first & second
    copy_cache(context, generation, key)
    generation.deliver_receive(key)
    generation.run()
    check_text(context, generation, key)
    assert report(generation, key).handoff_failures == ("as told by the test",)
    assert not report(generation, key).recomputed
    generation.check_idle()


@pytest.mark.parametrize("retried", [True, False])
@pytest.mark.parametrize("settled", [True, False])
def test_then_the_generation_computes_the_prompt_itself(retried: bool, settled: bool):
    context, generation, key = split(RECOMPUTE)
    if retried:
        generation.deliver_receive(key, FAILED, may_retry=True)
        generation.run()
    generation.deliver_receive(key, FAILED, settled=settled)
    generation.run()
    check_text(context, generation, key)
    assert report(generation, key).recomputed
    assert len(report(generation, key).handoff_failures) == 1 + retried
    assert len(destinations(generation)) == 1 + retried
    if not settled:
        assert not generation.trails[key].released, "a peer may still write"
        assert generation.blocks.used == 10
        generation.memory[generation.exposed[key]] = 0xBB
        generation.deliver_receive(key, FAILED)
        generation.run()
    generation.check_idle()


def test_what_a_late_writer_touches_is_nobodys_while_the_prompt_is_computed():
    context, generation, key = split(RECOMPUTE)
    generation.deliver_receive(key, FAILED, settled=False)
    while generation.step():
        generation.memory[generation.exposed[key]] = 0xBB
    check_text(context, generation, key)
    generation.deliver_receive(key, FAILED)
    generation.run()
    generation.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_while_the_prompt_is_computed_again_keeps_what_is_not_settled(steps: int):
    _, generation, key = split(RECOMPUTE)
    generation.deliver_receive(key, FAILED, settled=False)
    for _ in range(steps + 1):
        generation.step()
    generation.abort(key)
    assert isinstance(generation.trails[key].end, RequestFinished)
    assert not generation.trails[key].released
    assert generation.blocks.used == 10
    generation.deliver_receive(key, FAILED)
    generation.run()
    generation.check_idle()


def test_a_pages_settlement_before_the_end_does_not_end_the_request():
    context, generation, key = split(RECOMPUTE)
    generation.deliver_receive(key, FAILED, settled=False)
    generation.step()
    generation.deliver_receive(key, FAILED)
    generation.step()
    assert generation.trails[key].end is None
    generation.run()
    check_text(context, generation, key)
    generation.check_idle()


def test_without_room_for_fresh_pages_there_is_no_retry():
    context, generation, key = split(RECOMPUTE, num_blocks=16)
    generation.deliver_receive(key, FAILED, may_retry=True)
    generation.run()
    assert len(destinations(generation)) == 1
    assert generation.cancels(key) == 1, "the holder does not keep its pages for nothing"
    check_text(context, generation, key)
    assert report(generation, key).recomputed
    generation.check_idle()


def test_fail_means_fail():
    _, generation, key = split(FAIL)
    generation.deliver_receive(key, FAILED)
    generation.run()
    end = generation.trails[key].end
    assert isinstance(end, RequestFinished)
    assert isinstance(end.error, TransferFailed)
    generation.check_idle()


def test_an_aborted_request_is_not_tried_again():
    _, generation, key = split(RECOMPUTE)
    generation.abort(key)
    generation.deliver_receive(key, FAILED, may_retry=True)
    generation.run()
    assert len(destinations(generation)) == 1
    assert len(generation.messages(CancelTransfer)) >= 1
    generation.check_idle()


def test_a_recomputed_prompt_finds_what_is_here():
    context, generation, key = split(RECOMPUTE)
    copy_cache(context, generation, key)
    generation.deliver_receive(key)
    generation.run()
    again = context.submit(PROMPT, 9, **HOT)
    context.run()
    done = context.trails[again].end
    assert isinstance(done, ContextDone)
    phase = ContextPhase(again, done.first_tokens, len(PROMPT), HOLDER)
    generation.submit(PROMPT, 9, key=again, phase=phase, **HOT)
    generation.run()
    generation.deliver_receive(again, FAILED)
    steps = len(generation.rows)
    generation.run()
    check_text(context, generation, again)
    assert len(generation.rows) - steps < 12, "only the end of the prompt was computed"
    generation.check_idle()


def test_held_pages_are_capped_and_stop_admission():
    policy = HandoffPolicy(max_held_blocks=20)
    context = Bench("context", num_blocks=64, policy=policy, max_running=8)
    keys = [context.submit([*PROMPT[:36], 33 + index], 9) for index in range(3)]
    context.run()
    assert [isinstance(context.trails[key].end, ContextDone) for key in keys] == [True, True, False]
    assert context.scheduler.load().waiting_requests == 1
    context.deliver_send(keys[0])
    context.run()
    assert isinstance(context.trails[keys[2]].end, ContextDone)


def test_the_number_of_held_requests_is_capped_too():
    context = Bench("context", num_blocks=64, policy=HandoffPolicy(max_held_requests=2))
    for index in range(3):
        context.submit([65 + index], 9)
        context.run()
    assert len(context.messages(SendOffer)) == 2


def test_one_prompt_may_always_be_held():
    context = Bench("context", num_blocks=64, policy=HandoffPolicy(max_held_blocks=3))
    keys = [context.submit(PROMPT, 9) for _ in range(2)]
    context.run()
    assert isinstance(context.trails[keys[0]].end, ContextDone)
    assert context.trails[keys[1]].end is None
    context.deliver_send(keys[0])
    context.run()
    assert isinstance(context.trails[keys[1]].end, ContextDone)
