"""Writers that say nothing, and instances that leave, between real hubs over gRPC on localhost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hub_world import Side, assert_hubs_idle, connect, key, until
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.hub.fence_call import FenceCalls
from kvtransfer.messages import FenceAnswer, FenceWriter, ReceiveKey
from kvtransfer.ports import ReceiveOutcome, TransferFailure
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    """A context and a generation instance whose patience is short."""
    fabric = LoopbackFabric()
    context = Side("context-0", InstanceRole.CONTEXT, fabric, drain_s=0.05)
    generation = Side(
        "generation-0", InstanceRole.GENERATION, fabric, drain_s=0.05, timeout_s=0.2, in_doubt_s=0.2, ping_s=0.5
    )
    await context.start()
    await generation.start()
    await connect(generation, context)
    yield context, generation
    await asyncio.gather(generation.stop(), context.stop())


async def received(side: Side) -> ReceiveOutcome:
    return (await received_all(side))[0]


async def received_all(side: Side) -> list[ReceiveOutcome]:
    """What has come when something has: an unsettled and a settled outcome may come together."""
    outcomes: list[ReceiveOutcome] = []
    await until(lambda: outcomes.extend(side.scheduler.check_gen_transfer_status()) or outcomes)
    return outcomes


async def test_stopped_writer_is_killed_by_its_hub_and_the_pages_come_back(sides: tuple[Side, Side]):
    context, generation = sides
    context.agent.hold = True
    context.offer(key(1), 1)
    generation.ask(key(1), context.holder, 5)
    told = await received(generation)
    assert (told.settled, told.failure) == (False, TransferFailure.TIMED_OUT)
    await until(lambda: context.kills)
    ((rank, reason),) = context.kills
    assert rank == 0
    assert "generation-0" in reason
    assert generation.hub.sessions()
    context.kill_rank()
    over = await received(generation)
    assert over.settled
    assert_hubs_idle([generation])


async def test_request_that_crosses_the_end_of_its_holder_is_settled(sides: tuple[Side, Side]):
    context, generation = sides
    context.offer(key(1), 1)
    generation.ask(key(1), context.holder, 5)
    # Nothing has left yet: the request and the words of the leaving instance cross.
    context.kill_rank()
    context.hub.goodbye("asked to stop")
    await asyncio.sleep(0)
    await context.hub.close()
    outcomes = await received_all(generation)
    while not outcomes[-1].settled:
        outcomes += await received_all(generation)
    assert outcomes[-1].failure is TransferFailure.PEER_LOST
    await generation.hub.drain(10)
    assert_hubs_idle([generation])
    # Nothing new is asked of it.
    generation.ask(key(2), context.holder, 6)
    assert (await received(generation)).failure is TransferFailure.PEER_UNKNOWN


async def test_goodbye_of_a_generation_instance_withdraws_what_it_asked_for(sides: tuple[Side, Side]):
    context, generation = sides
    context.agent.hold = True
    context.offer(key(1), 1)
    generation.ask(key(1), context.holder, 5)
    await until(lambda: context.agent._open)
    generation.kill_rank()
    generation.hub.goodbye("asked to stop")
    await until(lambda: [view.state for view in context.hub.sessions()] == ["cancelling"])


async def test_hub_proves_without_a_stream(sides: tuple[Side, Side]):
    context, generation = sides
    answers: list[FenceAnswer] = []
    calls = FenceCalls(("g", generation.incarnation), None, lambda _, answer: answers.append(answer))
    fence = FenceWriter((ReceiveKey(key(1), 1),), "silent")
    peer = ("context-0", context.incarnation)
    calls.ask(peer, context.endpoint, fence)
    calls.ask(peer, context.endpoint, fence)
    await until(lambda: answers)
    assert answers == [FenceAnswer(context.incarnation, (), (), ())]
    context.kill_rank()
    calls.ask(peer, context.endpoint, fence)
    await until(lambda: len(answers) == 2)
    assert answers[1].exited_ranks == (0,)
    await calls.close()
