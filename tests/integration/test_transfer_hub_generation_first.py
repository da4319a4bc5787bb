"""Both legs start at once, between two real hubs over gRPC: intent, bind, chunks during prefill, first tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from hub_world import TOKENS_PER_BLOCK, Side, assert_hubs_idle, blocks, connect, key, until
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.ports import BindFailed, BindNews, Bound, FirstTokensArrived, ReceiveIntent, TokenRange, TransferFailure
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration
K = key(1)


@pytest.fixture
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    fabric = LoopbackFabric()
    context = Side("context-0", InstanceRole.CONTEXT, fabric, drain_s=0.05)
    generation = Side("generation-0", InstanceRole.GENERATION, fabric, layout="layer_major", drain_s=0.05, timeout_s=10)
    await context.start()
    await generation.start()
    await connect(generation, context)
    yield context, generation
    await asyncio.gather(generation.stop(), context.stop())


async def news(side: Side, kind: type[BindNews]) -> BindNews:
    arrived: list[BindNews] = []
    await until(lambda: arrived.extend(side.scheduler.check_bindings()) or arrived)
    (one,) = arrived
    assert isinstance(one, kind)
    return one


def chunk(side: Side, number: int, *ids: int, is_last: bool = False) -> None:
    """The chunk that ends with the last of these blocks has been computed."""
    side.storage.fill(np.array(ids, np.int32), 1)
    tokens = TokenRange(number * TOKENS_PER_BLOCK, len(ids) * TOKENS_PER_BLOCK)
    side.scheduler.respond_and_send_async(K, tokens, blocks(*ids), is_last=is_last)


async def test_chunks_arrive_while_later_ones_are_computed(sides: tuple[Side, Side]):
    context, generation = sides
    generation.scheduler.intend_to_receive(ReceiveIntent(K, context.holder))
    context.scheduler.bind_context(K)
    assert await news(generation, Bound) == Bound(K, 0)
    # The request is there before anything is computed.
    generation.ask(K, context.holder, 5, 6, 7)
    await until(lambda: [view.state for view in context.hub.sessions()] == ["writing"])
    chunk(context, 0, 1)
    source = context.block_bytes(1)
    await until(lambda: generation.block_bytes(5) == source)
    assert generation.scheduler.check_gen_transfer_status() == []
    chunk(context, 1, 1, 2)
    chunk(context, 2, 1, 2, 3, is_last=True)
    context.scheduler.send_first_tokens(K, b"token 42")
    assert await news(generation, FirstTokensArrived) == FirstTokensArrived(K, b"token 42")
    outcomes = []
    await until(lambda: outcomes.extend(generation.scheduler.check_gen_transfer_status()) or outcomes)
    assert outcomes[0].failure is TransferFailure.NONE
    assert outcomes[0].stats.writers.descriptors >= 3
    assert generation.block_bytes(5, 6, 7) == context.block_bytes(1, 2, 3)
    await until(context.scheduler.check_context_transfer_status)
    await asyncio.gather(context.hub.drain(10), generation.hub.drain(10))
    assert_hubs_idle([context, generation])


async def test_first_tokens_survive_a_broken_stream(sides: tuple[Side, Side]):
    context, generation = sides
    generation.scheduler.intend_to_receive(ReceiveIntent(K, context.holder))
    context.scheduler.bind_context(K)
    await news(generation, Bound)
    await context.sever()
    await until(lambda: generation.hub.pairs()[0].state.name == "CONNECTING")
    context.scheduler.send_first_tokens(K, b"token 42")
    await context.restore()
    assert await news(generation, FirstTokensArrived) == FirstTokensArrived(K, b"token 42")


async def test_context_leg_that_is_aborted_tells_who_waits(sides: tuple[Side, Side]):
    context, generation = sides
    generation.scheduler.intend_to_receive(ReceiveIntent(K, context.holder))
    context.scheduler.bind_context(K)
    await news(generation, Bound)
    assert not context.scheduler.cancel_request(K)
    failed = await news(generation, BindFailed)
    assert isinstance(failed, BindFailed)
    assert "withdrawn" in failed.reason
    await until(context.scheduler.check_context_transfer_status)
    await asyncio.gather(context.hub.drain(10), generation.hub.drain(10))
    assert_hubs_idle([context, generation])


async def test_generation_leg_that_goes_away_frees_the_context_leg(sides: tuple[Side, Side]):
    context, generation = sides
    generation.scheduler.intend_to_receive(ReceiveIntent(K, context.holder))
    context.scheduler.bind_context(K)
    await news(generation, Bound)
    assert generation.scheduler.cancel_request(K)
    outcomes = []
    await until(lambda: outcomes.extend(context.scheduler.check_context_transfer_status()) or outcomes)
    assert outcomes[0].failure is TransferFailure.CANCELLED
    await asyncio.gather(context.hub.drain(10), generation.hub.drain(10))
    assert_hubs_idle([context, generation])
