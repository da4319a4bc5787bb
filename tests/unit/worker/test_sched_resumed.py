"""A try that goes on with an answer which an earlier try has begun: not one token is another one for it."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_core.errors import InvalidRequest
from isthmus_worker.engine import FinishReason, Sampling
from mock_oracle import oracle
from sched_bench import Bench

PROMPT = [32 + index * 7 % 95 for index in range(21)]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5}


def answer(bench: Bench, key) -> list[int]:
    return bench.trails[key].answers.get(0, [])


@pytest.mark.parametrize("said", [1, 4, 11])
@pytest.mark.parametrize("sample", [0, 3])
@pytest.mark.parametrize("options", [{}, HOT])
def test_it_says_what_the_earlier_try_would_have_said(said: int, sample: int, options: dict[str, Any]):
    whole = oracle(PROMPT, 12, sampling=Sampling(12, n=4, **options), sample=sample)
    bench = Bench(num_blocks=64)
    key = bench.submit(PROMPT + whole[:said], 12 - said, resumed=said, first_sample=sample, **options)
    bench.run()
    assert whole[:said] + answer(bench, key) == whole
    assert bench.trails[key].reasons == {0: FinishReason.LENGTH}
    bench.check_idle()


def test_min_tokens_counts_what_was_said_before():
    stop = tuple(range(32, 127))[::2]
    sampling = Sampling(12, stop, min_tokens=6, **HOT)
    whole = oracle(PROMPT, 12, sampling=sampling)
    end = next(index for index, token in enumerate(whole) if token in stop)
    assert end >= 6, "the first tokens are none of the stop tokens"
    bench = Bench(num_blocks=64)
    key = bench.submit(PROMPT + whole[:4], 8, stop=stop, min_tokens=6, resumed=4, **HOT)
    bench.run()
    assert whole[:4] + answer(bench, key) == whole[: end + 1]


def test_penalties_see_what_was_said_before_as_output():
    bench = Bench(num_blocks=64)
    bench.submit([33, 34, 40, 41], 5, resumed=2, first_sample=3)
    (row,) = bench.scheduler.plan(bench.now).rows
    (draw,) = row.draws
    assert (draw.prompt.tolist(), draw.output.tolist(), draw.sample) == ([33, 34], [40, 41], 3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"resumed": len(PROMPT)}, "sampling.resumed_tokens"),
        ({"resumed": 1, "n": 2}, "sampling.resumed"),
        ({"first_sample": 1, "n": 2}, "sampling.first_sample"),
        ({"min_tokens": 8, "resumed": 2}, "sampling.min_tokens"),
    ],
)
def test_what_can_not_be_resumed_is_refused(changes: dict[str, Any], field: str):
    bench = Bench(num_blocks=64)
    with pytest.raises(InvalidRequest) as raised:
        bench.submit(PROMPT, 5, **changes)
    assert raised.value.field == field
    bench.check_idle()
