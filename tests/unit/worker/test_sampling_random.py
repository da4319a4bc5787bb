"""The random numbers: fixed for ever, in the open interval, even, and independent along every coordinate."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from isthmus_worker.sampling import uniforms
from sampling_oracle import chi_square, chi_square_limit, random_number

WORD = st.integers(0, (1 << 64) - 1)
COUNT = 20000
GOLDEN = [0.45407064605822545, 0.029030963974499113, 0.7175055992456031, 0.0854629661278502, 0.4683543839179899]


@given(st.lists(st.tuples(WORD, WORD, WORD), max_size=5))
def test_a_number_depends_on_its_key_alone(keys: list[tuple[int, int, int]]) -> None:
    assert uniforms(keys).tolist() == [random_number(*key) for key in keys]


def test_numbers_never_change_between_versions() -> None:
    """Instances of two versions serve one request: other numbers would be another text."""
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), ((1 << 64) - 1, 15, 131071)]
    assert uniforms(keys).tolist() == GOLDEN


@pytest.mark.parametrize("digest", [0, (1 << 64) - 1])
def test_neither_end_of_the_interval_is_reached(monkeypatch: pytest.MonkeyPatch, digest: int) -> None:
    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda _: digest)
    (number,) = uniforms([(1, 2, 3)])
    assert 0.0 < number < 1.0


def _along(coordinate: str) -> np.ndarray:
    line = range(COUNT)
    keys = {
        "position": ((7, 0, step) for step in line),
        "sample": ((7, step, 100) for step in line),
        "seed": ((step, 0, 100) for step in line),
        "high bits of the seed": ((step << 44, 0, 100) for step in line),
    }
    return uniforms(keys[coordinate])


@pytest.mark.parametrize("coordinate", ["position", "sample", "seed", "high bits of the seed"])
def test_numbers_are_even_and_independent(coordinate: str) -> None:
    numbers = _along(coordinate)
    observed = np.bincount((numbers * 100).astype(int), minlength=100).tolist()
    assert chi_square(observed, [0.01] * 100) < chi_square_limit(100)
    for lag in (1, 2, 16):
        pairs = (numbers[:-lag] * 10).astype(int) * 10 + (numbers[lag:] * 10).astype(int)
        observed = np.bincount(pairs, minlength=100).tolist()
        assert chi_square(observed, [0.01] * 100) < chi_square_limit(100), lag


def test_requests_samples_and_positions_do_not_meet() -> None:
    """Neighbours in all three coordinates at once: no two numbers are equal."""
    numbers = uniforms(itertools.product(range(30), range(16), range(60)))
    assert len(np.unique(numbers)) == len(numbers) == 30 * 16 * 60
