"""Token parity between instances of different parallelism: real processes, real NIXL writes, float32.

Every row runs 3 prompts, greedy and seeded, all at once, and compares each of 16 tokens with the unsplit run and with
transformers. Prompts are longer than a step, so that they are computed in chunks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from parity_fleet import Fleet, Shape, run_alone, run_split
from parity_models import VOCAB
from parity_oracle import cases, expected

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]


async def check(fleet: Fleet, context: Shape, generation: Shape) -> None:
    """Every case over the pair says what transformers does."""
    wanted = cases(VOCAB)
    first, second = await fleet.pair(context, generation)
    found = await asyncio.gather(*(run_split(first, second, case, fleet.number()) for case in wanted))
    assert [tokens for tokens, _ in found] == expected(context.model, wanted)
    for _, report in found:
        assert report.handoff.bytes > 0
        assert not report.recomputed
    for one in (first, second):
        await one.process.idle()


# Ordered so that neighbours share an instance: it is started once.
ROWS = {
    "TP2 to TP1": ({"tp": 2}, {}),
    "TP1 to TP2": ({}, {"tp": 2}),
    "TP3 to TP2": ({"tp": 3}, {"tp": 2}),
    "PP2 to TP2": ({"pp": 2}, {"tp": 2}),
    "TP2 to PP2": ({"tp": 2}, {"pp": 2}),
    "DP2 to TP2": ({"tp": 2, "dp": 2}, {"tp": 2}),
    "DP2 to DP2": ({"tp": 2, "dp": 2}, {"tp": 2, "dp": 2}),
    "TP4 to PP2": ({"tp": 4}, {"pp": 2}),
    "PP2xTP2 to TP1": ({"tp": 2, "pp": 2}, {}),
}


async def test_unsplit(fleet: Fleet, llama: Path) -> None:
    wanted = cases(VOCAB)
    one = await fleet.alone(Shape(llama))
    found = [await run_alone(one, case, fleet.number()) for case in wanted]
    assert found == expected(llama, wanted)
    assert len({token for tokens in found for token in tokens}) > 50  # not one token over and over


@pytest.mark.parametrize("row", ROWS)
async def test_split(fleet: Fleet, llama: Path, row: str) -> None:
    context, generation = ROWS[row]
    await check(fleet, Shape(llama, **context), Shape(llama, **generation))


async def test_more_ranks_than_kv_heads(fleet: Fleet, few_heads: Path) -> None:
    await check(fleet, Shape(few_heads, tp=4), Shape(few_heads))
