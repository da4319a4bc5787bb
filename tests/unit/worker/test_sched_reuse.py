"""Prefix caching in the scheduler: what is reused, what never is, and what the numbers say."""

from __future__ import annotations

import pytest

from isthmus_core.errors import InternalError
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase, KvEvent, Sampling
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.ports import TransferFailure
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, copy_cache

PROMPT = [32 + index * 7 % 95 for index in range(37)]


def cached(bench: Bench, key: RequestKey) -> int:
    """Prompt tokens that a request found here."""
    end = bench.trails[key].end
    assert end is not None
    return end.report.cached_tokens


def ask(bench: Bench, prompt: list[int], *, max_tokens: int = 5, salt: bytes = b"") -> int:
    """Runs one request, checks its text and returns the prompt tokens that it found."""
    key = bench.submit(prompt, max_tokens, salt=salt)
    bench.run()
    assert bench.trails[key].tokens == oracle(prompt, max_tokens)
    return cached(bench, key)


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (37, 36)])
def test_a_prompt_that_was_here_is_computed_from_its_first_missing_block_on(length: int, found: int):
    bench = Bench()
    assert ask(bench, PROMPT[:length]) == 0
    assert ask(bench, PROMPT[:length]) == found, "whole blocks, and at least one token is computed"
    assert ask(bench, PROMPT) == length // 4 * 4 if length < 37 else found
    bench.check_idle()


def test_the_prefill_starts_behind_what_is_there():
    bench = Bench(max_batch_tokens=8, num_blocks=64)
    ask(bench, PROMPT)
    key = bench.submit(PROMPT, 2)
    plan = bench.scheduler.plan(bench.now)
    assert [(row.start, len(row.token_ids)) for row in plan.rows] == [(36, 1)]
    bench.scheduler.apply(plan, bench.runner.execute(plan.rows), (), bench.now)
    bench.run()
    assert bench.trails[key].tokens == oracle(PROMPT, 2)


def test_what_was_generated_is_found_too():
    bench = Bench()
    ask(bench, PROMPT[:10], max_tokens=10)
    talk = [*PROMPT[:10], *oracle(PROMPT[:10], 10), 65]
    assert ask(bench, talk) == 16, "the last token of an answer is never computed, and 19 are 4 whole blocks"
    bench.check_idle()


def test_off_means_off():
    bench = Bench(prefix_caching=False)
    assert ask(bench, PROMPT) == 0
    assert ask(bench, PROMPT) == 0
    assert bench.blocks.cached == 0
    assert not [one for one in bench.log if isinstance(one, KvEvent)]


def test_salts_do_not_share():
    bench = Bench(num_blocks=64)
    assert [ask(bench, PROMPT, salt=salt) for salt in (b"", b"a", b"b", b"a", b"")] == [0, 0, 0, 36, 36]


def test_equal_blocks_behind_other_blocks_are_no_hit():
    bench = Bench(num_blocks=64)
    ask(bench, [65] * 4 + [70] * 8)
    assert ask(bench, [66] * 4 + [70] * 8) == 0
    assert ask(bench, [65] * 4 + [70] * 4 + [71] * 4) == 8


def test_prompts_that_run_side_by_side_share_from_their_first_common_step_on():
    bench = Bench(num_blocks=64, max_batch_tokens=256, max_running=8)
    keys = [bench.submit(PROMPT, 4) for _ in range(4)]
    bench.step()
    assert bench.blocks.used == 9 + 4, "equal blocks are kept once, the last one of each is its own"
    bench.run()
    assert all(bench.trails[key].tokens == oracle(PROMPT, 4) for key in keys)
    assert [cached(bench, key) for key in keys] == [0] * 4
    bench.check_idle()


def test_nothing_is_found_before_it_is_computed():
    bench = Bench(max_batch_tokens=8, num_blocks=64)
    first = bench.submit(PROMPT, 4)
    bench.step()
    second = bench.submit(PROMPT, 4)
    bench.run()
    assert cached(bench, second) == 8, "one step of the first one was over"
    assert bench.trails[first].tokens == bench.trails[second].tokens == oracle(PROMPT, 4)


def test_under_pressure_the_oldest_goes_and_text_stays_right():
    bench = Bench(num_blocks=12, max_model_len=48)
    prompts = [[32 + (start * 17 + index * 3) % 95 for index in range(12)] for start in range(6)]
    assert [ask(bench, prompt, max_tokens=4) for prompt in prompts] == [0] * 6
    assert ask(bench, prompts[5], max_tokens=4) == 8
    assert ask(bench, prompts[4], max_tokens=4) == 8
    assert ask(bench, prompts[0], max_tokens=4) == 0
    assert ask(bench, prompts[4], max_tokens=4) == 8, "used last but one"
    bench.check_idle()


def test_admission_counts_what_is_there():
    """A prompt of 10 blocks whose first 9 run already fits beside it into 12."""
    bench = Bench(num_blocks=12, max_batch_tokens=64)
    first = bench.submit(PROMPT, 6)
    bench.step()
    second = bench.submit(PROMPT, 6)
    bench.step()
    assert bench.scheduler.load().running_requests == 2
    bench.run()
    assert bench.trails[first].tokens == bench.trails[second].tokens == oracle(PROMPT, 6)
    bench.check_idle()


def test_what_an_admission_will_share_is_not_what_it_may_evict():
    """All blocks are idle or held: the hits of the next prompt must not count as room as well."""
    bench = Bench(num_blocks=10, max_model_len=40)
    ask(bench, PROMPT[:16], max_tokens=1)
    held = bench.submit([65] * 15, 9)
    bench.step()
    key = bench.submit(PROMPT[:24], 8)
    bench.run()
    assert bench.trails[held].tokens == oracle([65] * 15, 9)
    assert bench.trails[key].tokens == oracle(PROMPT[:24], 8)
    bench.check_idle()


def test_a_preempted_answer_finds_what_it_had():
    bench = Bench(num_blocks=8)
    keys = [bench.submit([65 + index], 20) for index in range(4)]
    computed = 0
    while True:
        plan = bench.scheduler.plan(bench.now)
        if not plan.rows:
            break
        computed += sum(len(row.token_ids) for row in plan.rows)
        bench.scheduler.apply(plan, bench.runner.execute(plan.rows), (), bench.now)
        bench.check()
    for index, key in enumerate(keys):
        assert bench.trails[key].tokens == oracle([65 + index], 20)
        assert cached(bench, key) == 0, "what it had itself is not counted"
    bench.check_idle()


def test_a_received_cache_is_reusable_only_when_it_is_here():
    context = Bench("context", num_blocks=64)
    generation = Bench("generation", num_blocks=64)
    keys = [context.submit(PROMPT, 9) for _ in range(2)]
    context.run()
    for key in keys:
        end = context.trails[key].end
        assert isinstance(end, ContextDone)
        generation.submit(PROMPT, 9, key=key, first=end.first_tokens[0].ids)
    generation.run()
    assert not generation.reusable, "nothing is complete"
    assert generation.blocks.used == 20, "blocks that a peer writes are nobody else's"
    copy_cache(context, generation, keys[0])
    generation.deliver_receive(keys[0])
    generation.step()
    assert len(generation.reusable) == 9
    copy_cache(context, generation, keys[1])
    generation.deliver_receive(keys[1])
    generation.step()
    assert generation.blocks.used == 9 + 2, "both go on with one copy"
    generation.run()
    for key in keys:
        assert generation.trails[key].tokens == oracle(PROMPT, 9)[1:]
        context.deliver_send(key)
    context.run()
    context.check_idle()
    generation.check_idle()


@pytest.mark.parametrize("failure", [TransferFailure.TIMED_OUT, TransferFailure.CANCELLED])
def test_a_cache_that_did_not_come_is_never_reused(failure: TransferFailure):
    generation = Bench("generation")
    key = generation.submit(PROMPT, 9)
    generation.run()
    generation.deliver_receive(key, failure)
    generation.run()
    assert not generation.reusable
    assert not generation.blocks.cached
    generation.check_idle()


def test_offered_blocks_stay_while_others_use_and_evict():
    context = Bench("context", num_blocks=12, max_model_len=48)
    key = context.submit(PROMPT[:16], 9)
    context.run()
    for start in range(5):
        other = context.submit([40 + start] * 20, 1)
        context.run()
        assert context.trails[other].tokens == oracle([40 + start] * 20, 1)
    again = context.submit([*PROMPT[:16], 70], 1)
    context.run()
    assert cached(context, again) == 16
    context.deliver_send(key)
    context.run()
    context.check_idle()


def test_what_a_failed_request_computed_is_not_used_again():
    bench = Bench(poison=7, max_batch_tokens=4)
    bad = bench.submit([65] * 8 + [7], 4)
    bench.run()
    end = bench.trails[bad].end
    assert isinstance(end, RequestFinished)
    assert isinstance(end.error, InternalError)
    assert ask(bench, [65] * 12) == 0
    bench.check_idle()


def test_readers_hear_of_what_can_be_found():
    bench = Bench(num_blocks=10, max_model_len=40)
    ask(bench, PROMPT[:16])
    stored = [one for one in bench.log if isinstance(one, KvEvent)]
    assert sum(len(one.stored) for one in stored) == 5
    assert not any(one.removed for one in stored)
    ask(bench, [65] * 30, max_tokens=4)
    removed = [name for one in bench.log if isinstance(one, KvEvent) for name in one.removed]
    assert len(removed) >= 3
    bench.check_idle()


@pytest.mark.parametrize(("window", "kept"), [(36, 0), (37, 9)])
def test_a_cache_of_which_layers_with_a_window_got_only_a_part_is_for_one_request(window: int, kept: int):
    context, generation = Bench("context", num_blocks=64), Bench("generation", num_blocks=64, window=window)
    key = context.submit(PROMPT, 9, n=2, temperature=1.0)
    context.run()
    end = context.trails[key].end
    assert isinstance(end, ContextDone)
    phase = ContextPhase(key, end.first_tokens, len(PROMPT), HOLDER)
    generation.submit(PROMPT, 9, key=key, phase=phase, n=2, temperature=1.0)
    generation.run()
    copy_cache(context, generation, key)
    generation.deliver_receive(key)
    generation.step()
    assert generation.blocks.cached == kept
    generation.run()
    assert generation.blocks.cached == kept + (4 if kept else 0), "nor what was decoded behind it"
    for sample in range(2):
        text = [*context.trails[key].answers[sample], *generation.trails[key].answers[sample]]
        assert text == oracle(PROMPT, 9, sampling=Sampling(9, temperature=1.0), sample=sample)
    generation.check_idle()
