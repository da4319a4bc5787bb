"""Token parity between instances whose caches are kept and laid out differently, and of what schedulers do to requests.

As `test_parity_ranks`; ordered so that neighbouring rows share an instance.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from isthmus.v1 import timeline_pb2

from parity_fleet import Fleet, Instance, Run, Shape, run_at_once, run_split
from parity_models import VOCAB
from parity_oracle import Case, cases, expected

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]

V1, V2 = "cache.manager=block_table", "cache.manager=radix"


def block(tokens: int) -> str:
    return f"engine.tokens_per_block={tokens}"


ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "V1 to V2": ((V1,), (V2,)),
    "V2 to V1": ((V2,), (V1,)),
    "blocks of 32 to 16": ((block(32),), (V1,)),
    "blocks of 16 to 32": ((V1,), (block(32),)),
    "blocks of 16 to 24": ((V1,), (block(24),)),
    "HND to NHD": ((V1,), ("cache.layout=nhd",)),
    "NHD to HND": (("cache.layout=nhd",), (V1,)),
    "slot-major to layer-major": ((V1,), ("cache.order=layer_major",)),
    "layer-major to slot-major": (("cache.order=layer_major",), (V1,)),
}


async def check(fleet: Fleet, context: Shape, generation: Shape, wanted: list[Case], run: Run = run_split) -> list[Any]:
    first, second = await fleet.pair(context, generation)
    found = await asyncio.gather(*(run(first, second, case, fleet.number()) for case in wanted))
    assert [tokens for tokens, _ in found] == expected(context.model, wanted)
    for one in (first, second):
        await one.process.idle()
    return [report for _, report in found]


@pytest.mark.parametrize("row", ROWS)
async def test_caches(fleet: Fleet, llama: Path, row: str) -> None:
    context, generation = ROWS[row]
    reports = await check(fleet, Shape(llama, settings=context), Shape(llama, settings=generation), cases(VOCAB))
    assert all(report.handoff.bytes for report in reports)


async def test_two_ranks_with_another_cache(fleet: Fleet, llama: Path) -> None:
    """Ranks, managers, blocks and layouts all differ."""
    context = Shape(llama, tp=2, settings=(V2, block(32), "cache.layout=nhd"))
    await check(fleet, context, Shape(llama, pp=2, settings=(V1, "cache.order=layer_major")), cases(VOCAB))


@pytest.mark.parametrize("managers", [(V1, V1), (V2, V2), (V1, V2)], ids=["V1", "V2", "V1 to V2"])
async def test_sliding_window(fleet: Fleet, sliding: Path, managers: tuple[str, str]) -> None:
    context, generation = (Shape(sliding, settings=(manager,)) for manager in managers)
    await check(fleet, context, generation, cases(VOCAB))


async def test_sliding_window_over_two_stages(fleet: Fleet, sliding: Path) -> None:
    await check(fleet, Shape(sliding, pp=2, settings=(V2,)), Shape(sliding, tp=2, settings=(V2,)), cases(VOCAB))


@pytest.mark.parametrize("manager", [V1, V2], ids=["V1", "V2"])
@pytest.mark.parametrize("sides", ["both", "context", "generation"])
async def test_prefix_reuse(fleet: Fleet, llama: Path, manager: str, sides: str) -> None:
    """The second time a prompt comes, a side that reuses has most of its blocks: they are not computed, not sent."""
    context, generation = (
        Shape(llama, settings=(manager, *(("engine.prefix_caching=true",) if sides in ("both", side) else ())))
        for side in ("context", "generation")
    )
    # Nobody has seen these prompts: rows share instances.
    wanted = cases(VOCAB, draw=100 + len(sides))[:3]
    first = await check(fleet, context, generation, wanted)
    again = await check(fleet, context, generation, wanted)
    sent = [sum(report.handoff.bytes for report in reports) for reports in (first, again)]
    assert sent[1] < sent[0] / 2 if sides != "context" else sent[1] == sent[0]
    pair = await fleet.pair(context, generation)
    cached = [await cached_tokens(one, len(wanted)) for one in pair]
    assert [count > 0 for count in cached] == [sides != "generation", sides != "context"]


async def cached_tokens(instance: Instance, legs: int) -> int:
    """Prompt tokens of its latest legs that were there already."""
    answer = await instance.process.stub.GetTimeline(timeline_pb2.GetTimelineRequest(limit=legs))
    return sum(leg.cached_tokens for leg in answer.legs)


async def test_both_legs_at_once(fleet: Fleet, llama: Path) -> None:
    """The cache moves in chunks while the prompt is computed."""
    await check(fleet, Shape(llama, tp=2), Shape(llama), cases(VOCAB), run_at_once)


LAYERED = {
    "two ranks": ("never", {"tp": 2}, ()),
    "two stages, another layout": ("never", {"pp": 2}, ("cache.layout=nhd",)),
    "two stages, another layout, in chunks": ("always", {"pp": 2}, ("cache.layout=nhd",)),
}


@pytest.mark.parametrize("row", LAYERED)
async def test_layer_by_layer(fleet: Fleet, llama: Path, row: str) -> None:
    """The end of a prompt is sent while its later layers are computed."""
    policy, sizes, other = LAYERED[row]
    settings = ("transfer.layer_wise=true", "logging.level=DEBUG", f"transfer.staging_policy={policy}")
    context, generation = Shape(llama, **sizes, settings=settings), Shape(llama, settings=other)
    await check(fleet, context, generation, cases(VOCAB), run_at_once)
    first, _ = await fleet.pair(context, generation)
    assert ("layer by layer, bounced" if policy == "always" else "layer by layer: ") in first.process.log


async def test_sixteen_at_once(fleet: Fleet, llama: Path) -> None:
    lengths = (3, 16, 17, 33, 60, 91, 120, 150)
    await check(fleet, Shape(llama, tp=2), Shape(llama), cases(VOCAB, lengths))
