"""Drawn tokens are those of the slow reference, setting by setting and all together, whatever the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow
from isthmus_worker.sampling import check_sampling, choose
from sampling_cases import row_at, tokens, want
from sampling_oracle import changed, distribution, draw, random_number

VOCAB = 24
SPREAD = np.random.default_rng(5).normal(0, 2.5, (12, VOCAB)).astype(np.float32)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
# Some logits are equal, as those of half-precision models often are; some are far below, some are none.
LOGITS = st.lists(
    st.one_of(
        st.integers(-6, 6).map(float), st.floats(-30, 30, width=32), st.sampled_from([-1e30, float("-inf"), 0.0, -0.0])
    ),
    min_size=VOCAB - 1,
    max_size=VOCAB - 1,
).map(lambda rest: np.array([0.5, *rest], np.float32))
# Token 0 always remains.
STOPS = st.lists(st.integers(1, VOCAB - 1), max_size=6).map(tuple)
BIAS = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=6).map(
    lambda found: tuple(found.items())
)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.just(20),
    stop_token_ids=STOPS,
    min_tokens=st.integers(0, 8),
    temperature=st.one_of(st.just(0.0), st.floats(0.05, 2), st.just(1e-30)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 3)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    seed=st.integers(0, (1 << 64) - 1),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.1, 10), st.just(1e-40)),
    logit_bias=BIAS,
)
CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "top_k and top_p": {"top_k": 9, "top_p": 0.7},
    "min_p and top_p": {"min_p": 0.1, "top_p": 0.7},
    "min_p and top_k": {"min_p": 0.05, "top_k": 5},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.8},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "reward of repetition": {"repetition_penalty": 0.6},
    "logit_bias": {"logit_bias": ((0, 3.0), (5, -4.0), (6, 2.5))},
    "min_tokens": {"min_tokens": 6},
}


def expected(logits: np.ndarray, row: BatchRow) -> list[int]:
    position = row.start + len(row.token_ids)
    found: list[int] = []
    for one in row.draws:
        values = changed(logits, one.sampling, one.prompt.tolist(), one.output.tolist())
        number = random_number(one.sampling.seed, one.sample, position)
        found.append(draw(distribution(values, one.sampling), number))
    return found


@pytest.fixture(params=[(256, 4096), (1, 2), (5,)], ids=["as configured", "in three stages", "in two stages"])
def stages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many candidates top-k and top-p look at before all of them; never visible in a token."""
    monkeypatch.setattr(choose, "_CANDIDATES", request.param)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.usefixtures("stages")
def test_each_setting_alone_does_what_the_reference_says(name: str, temperature: float) -> None:
    plain = Sampling(20, stop_token_ids=(3, 8, 11), temperature=temperature)
    setting = replace(plain, **CHANGES[name])
    check_sampling(setting, VOCAB)
    prompt, output = list(range(0, VOCAB, 2)), [4, 4, 4, 7, 9]
    rows = [row_at(7, *(want(replace(setting, seed=seed), 1, prompt, output) for seed in range(40))) for _ in SPREAD]
    found = tokens(SPREAD, rows)
    assert found == [expected(logits, row) for logits, row in zip(SPREAD, rows, strict=True)]
    untouched = tokens(
        SPREAD, [row_at(7, *(want(replace(plain, seed=seed), 1, prompt, output) for seed in range(40))) for _ in SPREAD]
    )
    acts = temperature > 0 or not CHANGES[name].keys() & {"top_p", "top_k", "min_p"}
    assert (found != untouched) == acts


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            LOGITS,
            st.integers(1, 1 << 20),
            st.lists(st.tuples(SAMPLINGS, st.integers(0, 15), TOKENS, TOKENS), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(256, 4096), (1, 2), (5,)]),
)
def test_all_settings_together_in_one_batch(cases: list, stages: tuple[int, ...]) -> None:
    logits = np.stack([values for values, _, _ in cases])
    rows = [row_at(position, *(want(*one) for one in draws)) for _, position, draws in cases]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_CANDIDATES", stages)
        found = tokens(logits, rows)
    assert found == [expected(values, row) for values, row in zip(logits, rows, strict=True)]


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=lambda one: next(iter(one)))
@pytest.mark.usefixtures("stages")
def test_tokens_of_equal_logit_stay_together(changes: dict[str, Any]) -> None:
    """Six tokens are the best: all of them are drawn, and nothing else."""
    logits = np.full((1, VOCAB), -1.0, np.float32)
    logits[0, 3::4] = 2.0
    draws = [want(Sampling(1, temperature=1.0, seed=seed, **changes)) for seed in range(200)]
    (found,) = tokens(logits, [row_at(1, *draws)])
    assert set(found) == set(range(3, VOCAB, 4))
