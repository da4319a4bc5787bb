"""The oracle refuses what an agent would refuse, and its cases are the same in every run."""

from __future__ import annotations

import numpy as np
import pytest

from kv_oracle.check import CaseFailed, check_case
from kv_oracle.draw import seeded_case
from kv_oracle.memory import NOTHING, Memory, RunRefused, execute
from kv_oracle.request import describe
from kvtransfer.peer_plan import PeerPlan
from kvtransfer.regions import RegionPairs


def run(*rows: tuple[int, int, int]) -> Memory:
    """(source, destination, bytes) from two adjacent source regions to one destination region."""
    source, target = Memory([(100, 50), (150, 50)], 7), Memory([(1000, 100)], NOTHING)
    columns = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    execute(source, target, *columns)
    return target


def test_runs_are_copied():
    target = run((100, 1000, 50), (150, 1050, 10))
    assert (target.codes[:60] == 7).all()
    assert (target.codes[60:] == NOTHING).all()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(140, 1000, 20)], "not inside one registration"),
        ([(190, 1000, 20)], "not inside one registration"),
        ([(90, 1000, 20)], "not inside one registration"),
        ([(100, 1090, 20)], "not inside one registration"),
        ([(100, 990, 20)], "not inside one registration"),
        ([(100, 1000, 20), (100, 1019, 2)], "written twice"),
        ([(100, 1000, 0)], "an empty run"),
    ],
)
def test_what_no_agent_would_copy_is_refused(rows, problem):
    with pytest.raises(RunRefused, match=problem):
        run(*rows)


def test_a_seed_is_a_case():
    assert [seeded_case(seed) for seed in range(20)] == [seeded_case(seed) for seed in range(20)]
    assert len({describe(seeded_case(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize("spoil", ["drop", "shift"])
def test_a_failure_describes_its_case(monkeypatch, spoil):
    whole = PeerPlan.instantiate

    def less(self, *args, **options):
        pairs = whole(self, *args, **options)
        rows = slice(1, None) if spoil == "drop" else slice(None)
        return RegionPairs(pairs.src[rows], pairs.dst[rows] + (spoil == "shift"), pairs.lengths[rows])

    monkeypatch.setattr(PeerPlan, "instantiate", less)
    with pytest.raises(CaseFailed) as caught:
        check_case(seeded_case(0))
    assert describe(seeded_case(0)) in str(caught.value)
