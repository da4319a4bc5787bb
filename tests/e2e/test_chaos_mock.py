"""Any one process of a cluster is killed under load: every answer is complete and right, or a typed error in time; then
nothing is left of any of it. Mock engines, whose text depends on the bytes that arrived, over real NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from chaos import chaos_cluster, run_chaos
from isthmus_client.plan import ClusterOptions
from mock_oracle import oracle, printable_prompts

# One of each kind; the others are killed at night.
FEW = ("router child", "coordinator", "context-0 hub", "generation-1 rank")
VICTIMS = (*FEW, "generation-0 hub", "context-1 rank")
MAX_TOKENS = 32


@cache
def _said(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return oracle(prompt, max_tokens)


def expected(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the mock model says."""
    return _said(tuple(prompt), max_tokens)


BASE = {"engine": {"mock": {"decode_us": 15_000, "prefill_us_per_token": 50}}}
OPTIONS = ClusterOptions(context=2, generation=2, engine="mock", base=BASE)
PROMPTS = printable_prompts(40, seed=3, longest=120)


@pytest.mark.timeout(240)
async def test_one_process_after_the_other_is_killed(tmp_path: Path) -> None:
    async with chaos_cluster(OPTIONS, tmp_path) as site:
        tally = await run_chaos(site, FEW, PROMPTS, expected, rate=10, max_tokens=MAX_TOKENS, pause_s=1.0)
        assert tally.recovered > 0, "no request was moved: the kills met none"
        # A killed router takes its streams with it; nobody else has to fail.
        assert tally.share_lost < 0.25, str(tally)
        assert tally.share_failed < 0.1, str(tally)


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_minutes_of_it(tmp_path: Path) -> None:
    async with chaos_cluster(OPTIONS, tmp_path) as site:
        tally = await run_chaos(site, VICTIMS * 3, PROMPTS, expected, rate=50, max_tokens=MAX_TOKENS, pause_s=3.0)
        assert tally.recovered > 0
        assert tally.share_lost < 0.1, str(tally)
        # None on a quiet machine; one that can not do 50 requests a second ends some at their deadlines.
        assert tally.share_failed < 0.02, str(tally)
