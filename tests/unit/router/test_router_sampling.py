"""Sampling options: defaults, ranges, names."""

import math
from dataclasses import asdict

import pytest

from isthmus_core.errors import InvalidRequest
from isthmus_router.sampling import RANGES, SamplingDefaults, SamplingOptions, check, resolve
from isthmus_worker.engine import Sampling as WorkerSampling
from isthmus_worker.sampling.params import check_sampling

NONE = SamplingDefaults()


def test_openais_defaults_hold_where_the_model_recommends_nothing() -> None:
    sampling = resolve(SamplingOptions(), NONE, (2,), 9, seed=5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.n, sampling.logprobs) == (1.0, 1, None)
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.seed) == (9, (2,), 5)


def test_the_model_recommends_and_the_request_decides() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2)
    plain = resolve(SamplingOptions(), defaults, (), 9, seed=0)
    assert plain.temperature == pytest.approx(0.6)
    assert (plain.top_p, plain.top_k, plain.min_p, plain.repetition_penalty) == (0.9, 20, 0.1, 1.2)
    asked = SamplingOptions(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1, seed=3)
    sampling = resolve(asked, defaults, (), 9, seed=0)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.seed) == (1, 3)


def test_seeds_are_64_bits_and_zero_is_a_seed() -> None:
    for asked, sent in ((0, 0), (-1, (1 << 64) - 1), ((1 << 64) - 1, (1 << 64) - 1)):
        assert resolve(SamplingOptions(seed=asked), NONE, (), 9, seed=77).seed == sent


def test_a_temperature_that_would_overflow_is_greedy() -> None:
    assert resolve(SamplingOptions(temperature=1e-40), NONE, (), 9, seed=0).temperature == 0


def test_stop_tokens_join_the_models_own() -> None:
    options = SamplingOptions(stop_token_ids=(5, 2))
    assert resolve(options, NONE, (2, 3), 9, seed=0).stop_token_ids == (2, 3, 5)
    ignoring = SamplingOptions(stop_token_ids=(5, 2), ignore_eos=True)
    assert resolve(ignoring, NONE, (2, 3), 9, seed=0).stop_token_ids == (5, 2)


@pytest.mark.parametrize("name", sorted(RANGES))
def test_both_bounds_are_allowed_and_nothing_beyond(name: str) -> None:
    least, most = RANGES[name]
    for value in (least, most):
        check(SamplingOptions(**{name: value}), 10)  # type: ignore[arg-type]
    for value in (least - 0.001, most + 1, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidRequest) as caught:
            check(SamplingOptions(prefix="sampling.", **{name: value}), 10)  # type: ignore[arg-type]
        assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (SamplingOptions(logit_bias=((10, 1.0),)), "logit_bias[10]"),
        (SamplingOptions(logit_bias=((9, math.nan),)), "logit_bias[9]"),
        (SamplingOptions(logit_bias=((9, 1.0), (9, 2.0))), "logit_bias[9]"),
        (SamplingOptions(stop_token_ids=(1,) * 129), "stop_token_ids"),
        (SamplingOptions(stop_token_ids=(1, -1), prefix="sampling."), "stop_token_ids[1]"),
        (SamplingOptions(stop=("x" * 1025,)), "stop[0]"),
        (SamplingOptions(stop=("x",) * 5), "stop"),
    ],
)
def test_lists_are_checked_entry_by_entry(options: SamplingOptions, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(options, 10)
    assert caught.value.field == field


def test_min_tokens_lie_within_the_budget() -> None:
    assert resolve(SamplingOptions(min_tokens=9), NONE, (), 9, seed=0).min_tokens == 9
    for wrong in (10, -1):
        with pytest.raises(InvalidRequest, match="min_tokens"):
            resolve(SamplingOptions(min_tokens=wrong), NONE, (), 9, seed=0)


def test_what_passes_here_passes_at_the_workers() -> None:
    for name, bounds in RANGES.items():
        for value in bounds:
            options = SamplingOptions(**{name: value})  # type: ignore[arg-type]
            check_sampling(WorkerSampling(**asdict(resolve(options, NONE, (2,), 9, seed=0))), 10)
    full = SamplingOptions(logit_bias=tuple((i, -100.0) for i in range(300)), stop_token_ids=tuple(range(128)))
    check(full, 1000)
    check_sampling(WorkerSampling(**asdict(resolve(full, NONE, tuple(range(128, 250)), 9, seed=0))), 1000)
