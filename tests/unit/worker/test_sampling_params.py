"""Bounds of every sampling setting: the edge is taken, the value behind it is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_core.errors import InvalidRequest
from isthmus_worker.engine import Sampling
from isthmus_worker.sampling import check_sampling

VOCAB = 320
PLAIN = Sampling(max_tokens=10)
NAN, INF = float("nan"), float("inf")

TAKEN = {
    "temperature": [0.0, 1e-30, 0.7, 2.0],
    "top_p": [1e-6, 0.5, 1.0],
    "top_k": [0, 1, VOCAB + 1, (1 << 32) - 1],
    "min_p": [0.0, 0.5, 1.0],
    "seed": [0, (1 << 64) - 1],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "repetition_penalty": [1e-6, 1.0, 10.0],
    "logit_bias": [(), ((0, -100.0), (VOCAB - 1, 100.0)), tuple((token, 0.5) for token in range(300))],
    "n": [1, 16],
    "logprobs": [None, 0, 20],
    "min_tokens": [0, 10],
    "max_tokens": [1, 1 << 31],
    "resumed": [0, 1, 1 << 24],
    "first_sample": [0, 15],
    "stop_token_ids": [(), (0, VOCAB - 1, 0), tuple(range(256))],
}
REFUSED = {
    "temperature": [-0.1, 2.1, NAN, INF, -INF],
    "top_p": [0.0, -0.1, 1.01, NAN, INF],
    "top_k": [-1],
    "min_p": [-0.01, 1.01, NAN, INF],
    "seed": [-1, 1 << 64],
    "presence_penalty": [-2.01, 2.01, NAN, INF],
    "frequency_penalty": [-2.01, 2.01, NAN, -INF],
    "repetition_penalty": [0.0, -1.0, 10.1, NAN, INF],
    "n": [0, 17, -1],
    "logprobs": [-1, 21],
    "min_tokens": [-1, 11],
    "max_tokens": [0, -1],
    "resumed": [-1, (1 << 24) + 1],
    "first_sample": [-1, 16],
    "stop_token_ids": [(-1,), (2, VOCAB), (1,) * 257],
}
REFUSED_BIAS = [
    (((VOCAB, 1.0),), "logit_bias", f"token {VOCAB}"),
    (((-1, 1.0),), "logit_bias", "token -1"),
    (((5, 100.1),), "logit_bias[5]", "100.1"),
    (((5, -100.1),), "logit_bias[5]", "-100.1"),
    (((5, NAN),), "logit_bias[5]", "nan"),
    (((5, INF),), "logit_bias[5]", "inf"),
    (((5, 1.0), (6, 1.0), (5, 2.0)), "logit_bias[5]", "given twice"),
    (tuple((token, 0.5) for token in range(301)), "logit_bias", "301 entries"),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in TAKEN for value in TAKEN[field]])
def test_values_in_range_are_taken(field: str, value: object) -> None:
    changed = {field: value}
    check_sampling(replace(PLAIN, **changed), VOCAB)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in REFUSED for value in REFUSED[field]])
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    changed = {field: value}
    with pytest.raises(InvalidRequest) as raised:
        check_sampling(replace(PLAIN, **changed), VOCAB)
    assert raised.value.field == f"sampling.{field}"
    assert raised.value.value
    assert raised.value.remedy


@pytest.mark.parametrize(("bias", "field", "value"), REFUSED_BIAS)
def test_bias_out_of_range_is_refused_with_its_token(
    bias: tuple[tuple[int, float], ...], field: str, value: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_sampling(replace(PLAIN, logit_bias=bias), VOCAB, "request")
    assert (raised.value.field, raised.value.value) == (f"request.{field}", value)


def test_stop_tokens_must_leave_one_for_the_shortest_answer() -> None:
    everything = tuple(range(200))
    check_sampling(replace(PLAIN, stop_token_ids=everything), 200)
    check_sampling(replace(PLAIN, stop_token_ids=everything[1:], min_tokens=2), 200)
    with pytest.raises(InvalidRequest, match="every token"):
        check_sampling(replace(PLAIN, stop_token_ids=everything, min_tokens=2), 200)


def test_every_setting_has_bounds_here() -> None:
    assert set(TAKEN) == set(Sampling.__slots__) == set(REFUSED) | {"logit_bias"}
