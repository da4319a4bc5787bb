"""Computing goes on while a cache is on its way: what the workers have recorded of themselves, and the tokens.

One agent of the context instance says that its writes are in flight for as long as a test wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio
from isthmus.v1 import timeline_pb2

from faulty_agent import Faults
from parity_fleet import Fleet, Instance, Shape, fetch, prefill, request, run_split
from parity_models import VOCAB
from parity_oracle import Case, cases, expected
from worker_process import BASE, BOTH, CONTEXT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]
# Two answers that are decoded, and a prompt whose cache is on its way.
LONG = cases(VOCAB, (90, 91), 80)
LATE = cases(VOCAB, (92,))[0]
Kind = timeline_pb2.TimelineKind


class World(NamedTuple):
    """The generation instance has 24 blocks: the two long answers need 22 of them, the late prompt 6."""

    faults: Faults
    context: Instance
    generation: Instance


@pytest_asyncio.fixture(scope="module", loop_scope="session", name="world")
async def _world(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> AsyncGenerator[World, None]:
    faults = Faults(tmp_path_factory.mktemp("faults"))
    settings = ("transfer.backend=faulty", "transfer.timeout_s=120")
    few = (*settings, "engine.num_blocks=24")
    async with Fleet(tmp_path_factory.mktemp("overlap"), environment=faults.environment) as fleet:
        pair = await fleet.pair(Shape(llama, tp=2, settings=settings), Shape(llama, settings=few))
        yield World(faults, *pair)


class Span(NamedTuple):
    """An entry of a timeline, in Unix time."""

    begin: int
    end: int

    def has(self, other: Span) -> bool:
        """All of it."""
        return self.begin <= other.begin and other.end <= self.end


async def recorded(instance: Instance, number: int, kind: Kind.ValueType) -> list[Span]:
    """Entries of a kind in the instance's own record of a request."""
    asked = timeline_pb2.GetTimelineRequest(request_id=BASE + number)
    (leg,) = (await instance.process.stub.GetTimeline(asked)).legs
    return [Span(one.begin_unix_ns, one.begin_unix_ns + one.duration_ns) for one in leg.entries if one.kind == kind]


async def with_a_late_cache(world: World, first: int, running: list[Case]) -> tuple[list[Any], Any]:
    """Answers of `running`, decoded to their ends while the cache of LATE is held up, and then that of LATE. Requests
    are numbered from `first` on, LATE is the last one."""
    context, generation = world.context, world.generation
    numbers = range(first, first + len(running))
    offers = [await prefill(context, case, number) for case, number in zip(running, numbers, strict=True)]
    late = await prefill(context, LATE, numbers.stop)
    answers = [
        asyncio.create_task(fetch(generation, case, number, offer))
        for case, number, offer in zip(running, numbers, offers, strict=True)
    ]
    while (await generation.process.load()).running_requests < len(running):
        await asyncio.sleep(0.002)
    while not all(await asyncio.gather(*(received(generation, number) for number in numbers))):
        await asyncio.sleep(0.002)
    with world.faults.held(1):
        fetching = asyncio.create_task(fetch(generation, LATE, numbers.stop, late))
        done = await asyncio.gather(*answers)
        assert not fetching.done()
    return list(done), await fetching


async def received(instance: Instance, number: int) -> bool:
    """The cache of a request has arrived."""
    return bool(await recorded(instance, number, Kind.TIMELINE_KIND_RECEIVE))


async def test_others_are_decoded_while_a_request_receives(world: World, llama: Path) -> None:
    """With blocks enough for both."""
    ((tokens, _),), (late, _) = await with_a_late_cache(world, 9201, LONG[:1])
    assert [tokens, late] == [expected(llama, LONG)[0], expected(llama, [LATE])[0]]
    (receive,) = await recorded(world.generation, 9202, Kind.TIMELINE_KIND_RECEIVE)
    (decode,) = await recorded(world.generation, 9201, Kind.TIMELINE_KIND_DECODE)
    assert decode.begin < receive.begin < decode.end < receive.end


async def test_prompts_are_computed_while_a_cache_is_sent(world: World, llama: Path) -> None:
    """The context instance, whose ranks are writing."""
    offer = await prefill(world.context, LATE, 9211)
    with world.faults.held(1):
        fetching = asyncio.create_task(fetch(world.generation, LATE, 9211, offer))
        while not (await world.generation.process.load()).used_blocks:
            await asyncio.sleep(0.002)
        other = await prefill(world.context, LONG[0], 9212)
        assert not fetching.done()
    assert (await fetching)[0] == expected(llama, [LATE])[0]
    assert (await fetch(world.generation, LONG[0], 9212, other))[0] == expected(llama, LONG)[0]
    sent = await recorded(world.context, 9211, Kind.TIMELINE_KIND_TRANSFER)
    chunks = await recorded(world.context, 9212, Kind.TIMELINE_KIND_PREFILL_CHUNK)
    assert len(sent) == 2
    assert chunks
    slow = max(sent, key=lambda one: one.end)
    assert all(slow.has(chunk) for chunk in chunks)


async def test_preemption_while_a_request_receives(world: World, llama: Path) -> None:
    """Too few blocks for all: the younger answer gives its own back, those of the cache that comes are not touched."""
    answers, (late, report) = await with_a_late_cache(world, 9221, LONG[:2])
    assert [tokens for tokens, _ in answers] == expected(llama, LONG)[:2]
    assert late == expected(llama, [LATE])[0]
    assert not report.recomputed
    (receive,) = await recorded(world.generation, 9223, Kind.TIMELINE_KIND_RECEIVE)
    preempted = await recorded(world.generation, 9222, Kind.TIMELINE_KIND_PREEMPTED)
    assert preempted
    assert all(receive.has(moment) for moment in preempted)
    assert not await recorded(world.generation, 9221, Kind.TIMELINE_KIND_PREEMPTED)
    assert (await run_split(world.context, world.generation, LATE, 9224))[0] == late
    for one in (world.context, world.generation):
        await one.process.idle()


async def test_what_can_not_fit_is_refused_and_what_does_not_fit_yet_waits(world: World, llama: Path) -> None:
    """24 blocks of 16 tokens: one request that needs more, and five at once that need 30 together."""
    for instance, kind, length, words in (
        (world.generation, BOTH, 380, "the KV cache of this instance holds 384 tokens"),
        (world.context, CONTEXT, 1200, "at most 1023 tokens"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await instance.process.stub.Generate(request(Case(tuple(range(4, 4 + length)), False), kind, 9231)).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    pair = (world.context, world.generation)
    wanted = [LATE] * 5
    found = await asyncio.gather(*(run_split(*pair, case, 9241 + at) for at, case in enumerate(wanted)))
    assert [tokens for tokens, _ in found] == expected(llama, [LATE]) * 5
    for instance in pair:
        await instance.process.idle()
