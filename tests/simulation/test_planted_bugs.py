"""Bugs that somebody might have written are found by seeds that nobody chose for them, within the stage's budget."""

from __future__ import annotations

import pytest

from handoff_sim import campaign

pytestmark = pytest.mark.simulation

# Schedules that a bug may survive; the stage runs ten times as many. The nightly run takes seeds of its own.
FIRST, LIMIT = 50_000, 2_000
NIGHTLY_FIRST, NIGHTLY_LIMIT = 20_000_000, 20_000
# What a bug that does not fit the code any more raises.
MISFITS = ("AttributeError", "TypeError", "NameError", "ImportError")


def judge(found: dict[str, tuple[int, str]], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{campaign.table(found)}")
    assert len(found) >= 14
    survivors = [name for name, (_, problem) in found.items() if not problem]
    assert not survivors, f"not found: {survivors}"
    misfits = [f"{name}: {problem}" for name, (_, problem) in found.items() if problem.startswith(MISFITS)]
    assert not misfits, f"planted wrongly: {misfits}"


@pytest.mark.timeout(300)
def test_every_planted_bug_is_found(capsys: pytest.CaptureFixture[str]):
    judge(campaign.hunt(FIRST, LIMIT), capsys)


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_every_planted_bug_is_found_by_other_seeds(capsys: pytest.CaptureFixture[str]):
    judge(campaign.hunt(NIGHTLY_FIRST, NIGHTLY_LIMIT), capsys)
