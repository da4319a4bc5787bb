"""Any deployment to any other: every byte arrives once, from the elected writer, and nothing else is touched.

The cases come from `kv_oracle.draw`; a failure prints the shrunk case. One seed alone:
`python tests/support/run_oracle_case.py SEED`.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kv_oracle.check import check_case
from kv_oracle.choose import ENTROPY
from kv_oracle.coverage import JOINT_SHARE, Coverage
from kv_oracle.draw import case_from
from kv_oracle.request import Case

QUICK_CASES = 500
NIGHTLY_RUNS, NIGHTLY_CASES = 20, 1000

deterministic = settings(
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    print_blob=False,
)
cases = st.binary(min_size=ENTROPY, max_size=ENTROPY).map(case_from)


def run(case: Case, coverage: Coverage) -> None:
    """Every fourth case also in strided and packed form, every eighth with the digests of both sides."""
    coverage.add(check_case(case, other_forms=case.ids % 4 == 0, digests=case.ids % 8 == 1))


def campaign(coverage: Coverage, number: int, count: int) -> None:
    """`count` cases that `number` decides, the same in every run."""

    @seed(number)
    @settings(deterministic, max_examples=count)
    @given(cases)
    def every_case(case: Case) -> None:
        run(case, coverage)

    every_case()


def assert_covered(coverage: Coverage, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{coverage.table()}")
    assert not coverage.empty, f"no case reached {coverage.empty}\n{coverage.table()}"
    assert coverage.joint_share >= JOINT_SHARE, coverage.table()


@pytest.mark.timeout(600)
def test_any_topology_to_any_topology(capsys: pytest.CaptureFixture[str]):
    coverage = Coverage()
    campaign(coverage, number=1, count=QUICK_CASES)
    assert_covered(coverage, capsys)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_many_more_topologies(capsys: pytest.CaptureFixture[str]):
    coverage = Coverage()
    for number in range(NIGHTLY_RUNS):
        campaign(coverage, number, NIGHTLY_CASES)
    assert coverage.cases >= NIGHTLY_RUNS * NIGHTLY_CASES
    assert_covered(coverage, capsys)
