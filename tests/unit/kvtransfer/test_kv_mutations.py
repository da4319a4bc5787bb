"""The oracle notices a broken planner: `tests/support/planner_mutations.py` keeps the list of ways to break it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner_mutations import MUTATIONS, first_failure, mutate

QUICK = ("head off by one", "source phase ignored", "middle chunks send partial blocks")


def test_every_mutation_still_finds_its_place(tmp_path: Path):
    assert len(MUTATIONS) >= 10
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for number, mutation in enumerate(MUTATIONS):
        mutate(mutation, tmp_path / str(number))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one.name in QUICK], ids=lambda one: one.name)
def test_a_broken_planner_is_caught(mutation):
    assert first_failure(mutation), f"{mutation.name}: every case passes with a broken planner"


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", [None, *MUTATIONS], ids=lambda one: one.name if one else "unchanged")
def test_every_broken_planner_is_caught(mutation):
    assert bool(first_failure(mutation)) == (mutation is not None)
