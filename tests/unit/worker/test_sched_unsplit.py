"""Requests that stay on one instance: batching, blocks, preemption, the end of a request, refusals."""

from __future__ import annotations

import pytest

from isthmus_core.errors import (
    DuplicateRequest,
    InternalError,
    InvalidRequest,
    IsthmusError,
    Overloaded,
    RequestCancelled,
)
from isthmus_worker.engine import ContextPhase, FinishReason, RequestType, Tokens
from isthmus_worker.scheduler import RequestFinished, RequestTokens
from isthmus_worker.scheduler.answer import TRANSITIONS, Phase
from mock_oracle import oracle
from sched_bench import HOLDER, LEGS, Bench, new_key

PROMPT = [32 + index * 7 % 95 for index in range(37)]


def end_of(bench: Bench, key) -> RequestFinished:
    end = bench.trails[key].end
    assert isinstance(end, RequestFinished)
    return end


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 37])
def test_text_is_the_models_whatever_the_length(length: int):
    bench = Bench()
    key = bench.submit(PROMPT[:length], 9)
    bench.run()
    assert bench.trails[key].tokens == oracle(PROMPT[:length], 9)
    assert bench.trails[key].reason is FinishReason.LENGTH
    bench.check_idle()


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
def test_text_does_not_depend_on_the_size_of_the_chunks(budget: int):
    bench = Bench(max_batch_tokens=budget, num_blocks=64)
    keys = {bench.submit(PROMPT[: 5 + 8 * index], 6): 5 + 8 * index for index in range(4)}
    bench.run()
    for key, length in keys.items():
        assert bench.trails[key].tokens == oracle(PROMPT[:length], 6)
    bench.check_idle()


def test_a_step_never_computes_more_than_the_budget_or_the_rows():
    bench = Bench(max_batch_tokens=5, max_running=3, num_blocks=64)
    for _ in range(8):
        bench.submit(PROMPT, 4)
    while True:
        plan = bench.scheduler.plan(bench.now)
        if not plan.rows:
            break
        assert sum(len(row.token_ids) for row in plan.rows) == 5 - plan.left <= 5
        assert len(plan.rows) <= 3
        bench.scheduler.apply(plan, bench.runner.execute(plan.rows), (), bench.now)
    bench.check_idle()


def test_decoding_goes_on_while_a_long_prompt_is_computed_in_chunks():
    bench = Bench(max_batch_tokens=8, num_blocks=64)
    talking = bench.submit(PROMPT[:3], 30)
    bench.step()
    long = bench.submit(PROMPT, 2)
    for step in range(5):
        bench.step()
        assert len(bench.trails[talking].tokens) == 2 + step, "one token a step, prompt or no prompt"
    assert not bench.trails[long].tokens
    bench.step()
    assert len(bench.trails[long].tokens) == 1
    bench.run()
    bench.check_idle()


def test_admission_is_in_order_of_arrival_even_if_a_later_one_would_fit():
    bench = Bench(num_blocks=12, prefix_caching=False)
    first = bench.submit(PROMPT[:28], 8)
    big = bench.submit(PROMPT, 8)
    small = bench.submit(PROMPT[:2], 2)
    bench.step()
    bench.step()
    bench.step()
    assert bench.trails[first].tokens
    assert not bench.trails[big].tokens
    assert not bench.trails[small].tokens
    assert bench.scheduler.load().waiting_requests == 2
    bench.run()
    for key, prompt, n in ((first, PROMPT[:28], 8), (big, PROMPT, 8), (small, PROMPT[:2], 2)):
        assert bench.trails[key].tokens == oracle(prompt, n)
    bench.check_idle()


def test_the_youngest_is_preempted_and_its_text_does_not_change():
    bench = Bench(num_blocks=8)
    keys = [bench.submit([65 + index], 20) for index in range(4)]
    held = dict.fromkeys(keys, 0)
    preempted: list = []
    while bench.step():
        for key in keys:
            now = bench.held(key)
            if now < held[key] and not bench.trails[key].released:
                preempted.append(key)
            held[key] = now
    assert preempted
    assert keys[0] not in preempted, "the oldest always gets on"
    for index, key in enumerate(keys):
        assert bench.trails[key].tokens == oracle([65 + index], 20)
        assert end_of(bench, key).report.decode_tokens == 19
    bench.check_idle()


def test_a_preempted_request_comes_back_before_later_ones():
    bench = Bench(num_blocks=8, max_running=4)
    keys = [bench.submit([65 + index], 20) for index in range(7)]
    bench.run()
    ends = [event.key for event in bench.log if isinstance(event, RequestFinished)]
    assert ends == keys
    bench.check_idle()


def test_one_request_may_fill_the_whole_cache():
    bench = Bench(num_blocks=8, max_model_len=32)
    key = bench.submit(PROMPT[:12], 20)
    other = bench.submit(PROMPT[:12], 20)
    bench.run()
    assert bench.trails[key].tokens == bench.trails[other].tokens == oracle(PROMPT[:12], 20)
    bench.check_idle()


@pytest.mark.parametrize("position", [0, 2])
def test_a_stop_token_ends_the_request_and_is_part_of_the_output(position: int):
    expected = oracle(PROMPT, 9)
    stop = expected[position]
    assert stop not in expected[:position]
    bench = Bench()
    key = bench.submit(PROMPT, 9, stop=[stop, 256])
    bench.run()
    assert bench.trails[key].tokens == expected[: position + 1]
    assert bench.trails[key].reason is FinishReason.STOP
    bench.check_idle()


def test_report_says_where_the_time_went():
    bench = Bench(max_running=1)
    first, second = bench.submit([65], 3), bench.submit(PROMPT, 4)
    bench.run()
    report = end_of(bench, first).report
    assert (report.context_queue, report.prefill, report.decode, report.decode_tokens) == (0.0, 1.0, 2.0, 2)
    report = end_of(bench, second).report
    assert (report.context_queue, report.prefill, report.decode, report.decode_tokens) == (3.0, 3.0, 3.0, 3)
    assert report.handoff is None
    assert report.generation_queue is None


def test_load_counts_what_is_there():
    bench = Bench(max_running=2, num_blocks=32, prefix_caching=False)
    for _ in range(3):
        bench.submit(PROMPT[:7], 3)
    bench.step()
    load = bench.scheduler.load()
    assert (load.running_requests, load.waiting_requests, load.held_handoffs) == (2, 1, 0)
    assert (load.used_blocks, load.total_blocks) == (4, 32)
    bench.run()
    assert bench.scheduler.load().used_blocks == 0


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_abort_ends_a_request_wherever_it_is(steps: int):
    bench = Bench(max_running=1)
    keys = [bench.submit(PROMPT, 10), bench.submit(PROMPT[:3], 10)]
    for _ in range(steps):
        bench.step()
    for key in keys:
        bench.abort(key)
        assert isinstance(end_of(bench, key).error, RequestCancelled)
        assert bench.trails[key].released
        bench.abort(key)
    bench.check_idle()
    assert not bench.step()


def test_rows_without_usable_logits_fail_alone():
    bench = Bench(poison=7, num_blocks=64)
    good, bad = bench.submit(PROMPT, 5), bench.submit([7, 7], 5)
    bench.run()
    assert bench.trails[good].tokens == oracle(PROMPT, 5)
    end = end_of(bench, bad)
    assert isinstance(end.error, InternalError)
    assert not bench.trails[bad].tokens
    bench.check_idle()


def test_the_queue_is_bounded():
    bench = Bench(max_waiting=2)
    bench.submit([65], 2)
    bench.submit([65], 2)
    with pytest.raises(Overloaded, match=r"engine\.max_waiting"):
        bench.submit([65], 2)
    bench.run()
    bench.check_idle()
    bench.submit([65], 2)


def test_a_live_key_is_refused_and_may_be_used_again_later():
    bench = Bench()
    key = bench.submit([65], 2)
    with pytest.raises(DuplicateRequest):
        bench.submit([66], 2, key=key)
    bench.run()
    assert bench.trails[key].tokens == oracle([65], 2)
    bench.submit([66], 2, key=key)
    bench.run()
    assert bench.trails[key].tokens == oracle([66], 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field", "words"),
    [
        ([], 4, "prompt", "at least one token"),
        ([257], 4, "prompt", "[0, 257)"),
        ([65, -1], 4, "prompt", "token -1"),
        ([65], 0, "sampling.max_tokens", "at least 1"),
        ([65] * 128, 1, "prompt", "at most 127 tokens"),
        ([65] * 100, 29, "sampling.max_tokens", "at most 28"),
        ([65] * 30, 35, "sampling.max_tokens", "64 tokens"),
        ([65] * 70, 1, "prompt", "64 tokens"),
    ],
)
def test_what_can_never_run_is_refused(prompt: list[int], max_tokens: int, field: str, words: str):
    bench = Bench(num_blocks=16)
    with pytest.raises(InvalidRequest) as caught:
        bench.submit(prompt, max_tokens)
    assert caught.value.field == field
    assert words in caught.value.message
    bench.check_idle()


def test_a_generation_instance_answers_a_prompt_of_its_own():
    bench = Bench("generation")
    key = bench.submit([65, 66, 67], 6, leg=RequestType.CONTEXT_AND_GENERATION)
    bench.run()
    assert bench.trails[key].answers[0] == oracle([65, 66, 67], 6)
    bench.check_idle()


@pytest.mark.parametrize("role", list(LEGS))
@pytest.mark.parametrize("leg", list(RequestType))
def test_an_instance_takes_the_legs_of_its_role_only(role: str, leg: RequestType):
    bench = Bench(role)
    # A generation instance also computes prompts itself: those that are cheaper to compute than to fetch.
    if leg in (LEGS[role], LEGS["context_and_generation"] if role == "generation" else None):
        bench.submit([65], 4, leg=leg)
        return
    with pytest.raises(InvalidRequest, match=f"role {role}") as caught:
        bench.submit([65], 4, leg=leg)
    assert caught.value.field == "request_type"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_tokens": 2}, "context_phase.prompt_tokens"),
        ({"first_tokens": ()}, "context_phase.first_tokens"),
        ({"first_tokens": (Tokens((999,)),)}, "context_phase.first_tokens"),
        ({"first_tokens": (Tokens(()),)}, "context_phase.first_tokens"),
        ({"first_tokens": (Tokens((65,), sample=1),)}, "context_phase.first_tokens"),
        ({"first_tokens": (Tokens((65,)), Tokens((65,), sample=1))}, "context_phase.first_tokens"),
        ({"first_tokens": (Tokens((65,), reason=FinishReason.STOP),)}, "context_phase.first_tokens"),
        ({"first_tokens": (Tokens((65, 66, 67, 68)),)}, "sampling.max_tokens"),
        ({"first_tokens": (Tokens((256,)),)}, "context_phase.first_tokens"),
        ({"key": new_key()}, "context_phase.key"),
    ],
)
def test_a_generation_leg_with_an_impossible_context_phase_is_refused(change: dict, field: str):
    bench, key = Bench("generation"), new_key()
    phase = ContextPhase(
        **{"key": key, "first_tokens": (Tokens((65,)),), "prompt_tokens": 1, "holder": HOLDER, **change}
    )
    with pytest.raises(InvalidRequest) as caught:
        bench.submit([65], 4, key=key, phase=phase, stop=[256])
    assert caught.value.field == field
    bench.check_idle()


def test_a_context_phase_without_a_generation_leg_is_refused():
    key = new_key()
    with pytest.raises(InvalidRequest, match="context_phase"):
        Bench("context").submit([65], 4, key=key, phase=ContextPhase(key, (Tokens((65,)),), 1, HOLDER))


def test_refusals_leave_no_event():
    bench = Bench()
    with pytest.raises(IsthmusError):
        bench.submit([], 4)
    assert not bench.log


def test_tokens_come_one_step_at_a_time():
    bench = Bench()
    bench.submit([65], 3)
    bench.run()
    assert [len(one.chunk.ids) for one in bench.log if isinstance(one, RequestTokens)] == [1, 1, 1]


def test_the_table_of_transitions_has_one_way_out():
    assert TRANSITIONS[Phase.RELEASED] == frozenset()
    assert set(TRANSITIONS) == set(Phase)
    assert all(Phase.RELEASED in TRANSITIONS[phase] for phase in Phase if phase is not Phase.RELEASED)
