"""Drawn frequencies over a fixed set of seeds are those of the softmax; draws do not know of each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isthmus_worker.engine import Sampling
from sampling_cases import row_at, tokens, want
from sampling_oracle import chi_square, chi_square_limit, distribution

VOCAB = 60
DRAWS = 6000
LOGITS = np.random.default_rng(11).normal(0, 2, VOCAB).astype(np.float32)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def _sampling(**settings: Any) -> Sampling:
    return Sampling(**{"max_tokens": 1, "temperature": 1.0, **settings})


def _softmax(temperature: float = 1.0) -> list[float]:
    return torch.softmax(torch.as_tensor(LOGITS).double() / temperature, 0).tolist()


def test_the_reference_is_softmax_where_nothing_is_filtered() -> None:
    for temperature in (0.4, 1.0, 2.0):
        assert distribution(LOGITS.tolist(), _sampling(temperature=temperature)) == pytest.approx(_softmax(temperature))


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_are_the_probabilities(name: str) -> None:
    settings = SETTINGS[name]
    expected = distribution(LOGITS.tolist(), _sampling(**settings))
    assert (min(expected) == 0) == (name not in {"plain", "hot", "cold"})
    draws = [want(_sampling(seed=seed, **settings)) for seed in range(DRAWS)]
    (found,) = tokens(LOGITS[None], [row_at(9, *draws)])
    observed = np.bincount(found, minlength=VOCAB).tolist()
    assert chi_square(observed, expected) < chi_square_limit(sum(value * DRAWS >= 5 for value in expected) + 1)


def test_a_wrong_distribution_would_be_seen() -> None:
    draws = [want(_sampling(seed=seed, temperature=1.1)) for seed in range(DRAWS)]
    (found,) = tokens(LOGITS[None], [row_at(9, *draws)])
    assert chi_square(np.bincount(found, minlength=VOCAB).tolist(), _softmax()) > chi_square_limit(VOCAB)


@pytest.mark.parametrize("along", ["samples", "positions"])
def test_neighbours_are_independent(along: str) -> None:
    """One request: pairs of neighbouring answers, or of neighbouring positions, are as likely as the product says."""
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampling = _sampling(seed=77)
    if along == "samples":
        (found,) = tokens(logits[None], [row_at(5, *(want(sampling, sample) for sample in range(DRAWS)))])
    else:
        rows = [row_at(position, want(sampling)) for position in range(1, DRAWS + 1)]
        found = [one[0] for one in tokens(np.tile(logits, (DRAWS, 1)), rows)]
    single = np.array([0.5, 0.3, 0.2])
    pairs = np.bincount(np.array(found[:-1]) * 3 + found[1:], minlength=9).tolist()
    assert chi_square(pairs, np.outer(single, single).reshape(-1).tolist()) < chi_square_limit(9)
    # Runs of one token are as long as they should be: the same number is not used twice.
    assert np.mean(np.array(found[:-1]) == found[1:]) == pytest.approx(0.38, abs=0.03)
