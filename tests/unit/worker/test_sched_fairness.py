"""Budget, fairness and the bound of the queue, under a clock that the test turns."""

from __future__ import annotations

import pytest

from isthmus_core.errors import Overloaded
from isthmus_core.keys import RequestKey
from isthmus_worker.scheduler.service_rate import ServiceRate
from mock_oracle import oracle
from sched_bench import Bench


def prompt(number: int, length: int) -> list[int]:
    """Prompts that share no block."""
    return [32 + (number * 29 + index * 7) % 95 for index in range(length)]


def tokens(bench: Bench, key: RequestKey) -> int:
    """Tokens that a request has so far."""
    return len(bench.trails[key].tokens)


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 8, 16])
def test_an_endless_stream_of_prompts_does_not_stop_decoding(budget: int):
    bench = Bench(max_batch_tokens=budget, num_blocks=400, max_running=4, max_waiting=100, max_model_len=64)
    talking = bench.submit(prompt(0, 3), 40)
    while not tokens(bench, talking):
        bench.step()
    for number in range(1, 60):
        bench.submit(prompt(number, 20), 1)
    quiet = longest = 0
    while tokens(bench, talking) < 40:
        assert bench.scheduler.load().waiting_requests, "the stream has ended before the answer"
        before = tokens(bench, talking)
        bench.step()
        quiet = 0 if tokens(bench, talking) > before else quiet + 1
        longest = max(longest, quiet)
    assert longest <= (0 if budget > 1 else 1), "steps without a token"
    bench.run()
    assert bench.trails[talking].tokens == oracle(prompt(0, 3), 40)
    bench.check_idle()


@pytest.mark.parametrize("budget", [1, 2, 4, 8])
def test_a_full_batch_of_decoding_does_not_stop_prompts(budget: int):
    bench = Bench(max_batch_tokens=budget, num_blocks=400, max_running=12, max_waiting=100, max_model_len=128)
    talking = [bench.submit(prompt(number, 1), 100) for number in range(11)]
    while not all(tokens(bench, key) for key in talking):
        bench.step()
    late = bench.submit(prompt(50, 16), 2)
    steps = 0
    while not tokens(bench, late):
        bench.step()
        steps += 1
    assert steps <= (2 * 16 if budget == 1 else 16 // max(1, budget // 4)) + 1
    assert all(tokens(bench, key) < 100 for key in talking)
    for key in (*talking, late):
        bench.abort(key)
    bench.check_idle()


def test_decoding_that_does_not_fit_takes_turns():
    bench = Bench(max_batch_tokens=3, num_blocks=400, max_running=8, max_model_len=128)
    keys = [bench.submit(prompt(number, 1), 60) for number in range(8)]
    while not all(tokens(bench, key) for key in keys):
        bench.step()
    before = [tokens(bench, key) for key in keys]
    for _ in range(40):
        bench.step()
    made = [tokens(bench, key) - then for key, then in zip(keys, before, strict=True)]
    assert sum(made) == 3 * 40
    assert max(made) - min(made) <= 1
    bench.run()
    for number, key in enumerate(keys):
        assert bench.trails[key].tokens == oracle(prompt(number, 1), 60)


def test_the_batch_is_full_when_one_side_has_nothing_to_do():
    bench = Bench(max_batch_tokens=8, num_blocks=400, max_running=8, max_model_len=128, max_waiting=9)
    for number in range(9):
        bench.submit(prompt(number, 1), 30)
    bench.step()
    assert bench.scheduler.load().waiting_requests == 1
    plan = bench.scheduler.plan(bench.now)
    assert len(plan.rows) == 8, "the prompt that waits can not come in: the whole step is decoding's"


def test_turns_and_preemption_together_keep_every_text():
    bench = Bench(max_batch_tokens=3, num_blocks=12, max_running=8, max_model_len=48)
    keys = [bench.submit(prompt(number, 1 + number), 24) for number in range(8)]
    bench.run()
    for number, key in enumerate(keys):
        assert bench.trails[key].tokens == oracle(prompt(number, 1 + number), 24)
    bench.check_idle()


def test_a_full_queue_says_how_long_it_takes_by_what_was_measured():
    bench = Bench(max_running=1, max_waiting=3, num_blocks=64)
    for number in range(3):
        bench.submit(prompt(number, 4), 8)
    with pytest.raises(Overloaded) as unknown:
        bench.submit([65], 2)
    assert unknown.value.retry_after_s == 1.0, "nothing is known yet"
    for _ in range(8 * 2):
        bench.step()
    for number in range(3, 5):
        bench.submit(prompt(number, 4), 8)
    with pytest.raises(Overloaded) as measured:
        bench.submit([65], 2)
    assert measured.value.retry_after_s == pytest.approx(3 * 8, rel=0.35), "three wait, each takes 8 seconds"
    bench.run()
    bench.check_idle()


def test_the_measured_rate():
    rate = ServiceRate()
    assert rate.wait_s(1000, 5.0) == 1.0
    for second in range(100):
        rate.note(second * 0.5)
    assert rate.wait_s(100, 49.5) == pytest.approx(100 * 0.5, rel=0.05)
    assert rate.wait_s(1, 49.5) == 1.0, "at least a second"
    assert rate.wait_s(1000, 49.5) == 60.0, "at most a minute"
    assert rate.wait_s(10, 49.5 + 64) == pytest.approx(10 * 2.5, rel=0.05), "a queue that stands still is slow"
