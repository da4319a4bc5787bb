"""One release of skew either way: an older or newer peer works with what both know, or is refused with reasons."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hub_world import Side, assert_hubs_idle, connect, key, until
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.control.negotiation import Dialect
from kvtransfer.hub import PairState
from kvtransfer.messages import Capability
from kvtransfer.ports import BindFailed, ReceiveIntent, ReceiveOutcome, TransferFailure
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration

OLDER = Dialect(capabilities=frozenset())
NEWER = Dialect(protocol_version=2, min_protocol_version=1)
TOO_NEW = Dialect(protocol_version=3, min_protocol_version=2)


class Sides(list[Side]):
    """Stopped at the end."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()

    async def pair(self, context: Dialect | None, generation: Dialect | None) -> tuple[Side, Side]:
        there = Side("context-0", InstanceRole.CONTEXT, self.fabric, dialect=context, drain_s=0.05)
        here = Side("generation-0", InstanceRole.GENERATION, self.fabric, dialect=generation, drain_s=0.05, timeout_s=2)
        for side in (there, here):
            await side.start()
            self.append(side)
        return there, here


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    sides = Sides()
    yield sides
    await asyncio.gather(*(side.stop() for side in reversed(sides)))


async def outcome(side: Side) -> ReceiveOutcome:
    found: list[ReceiveOutcome] = []
    await until(lambda: found.extend(side.scheduler.check_gen_transfer_status()) or found)
    return found[0]


@pytest.mark.parametrize(
    ("context", "generation"),
    [(OLDER, None), (None, OLDER), (NEWER, None), (None, NEWER)],
    ids=["older context", "older generation", "newer context", "newer generation"],
)
async def test_a_neighbouring_release_hands_off(sides: Sides, context: Dialect | None, generation: Dialect | None):
    there, here = await sides.pair(context, generation)
    await connect(here, there)
    assert [view.protocol_version for view in here.hub.core.peers()] == [1]
    assert here.hub.core.peers()[0].limits == there.hub.core.peers()[0].limits
    there.offer(key(1), 1, 2)
    here.ask(key(1), there.holder, 5, 6)
    assert (await outcome(here)).failure is TransferFailure.NONE
    assert here.block_bytes(5, 6) == there.block_bytes(1, 2)
    await until(there.scheduler.check_context_transfer_status)
    await asyncio.gather(there.hub.drain(10), here.hub.drain(10))
    assert_hubs_idle([there, here])


async def test_what_the_older_side_does_not_speak_is_not_asked_of_it(sides: Sides):
    there, here = await sides.pair(OLDER, None)
    await connect(here, there)
    assert Capability.GENERATION_FIRST not in here.hub.core.peers()[0].capabilities
    here.scheduler.intend_to_receive(ReceiveIntent(key(1), there.holder))
    news: list[object] = []
    await until(lambda: news.extend(here.scheduler.check_bindings()) or news)
    (failed,) = news
    assert isinstance(failed, BindFailed)
    assert failed.failure is TransferFailure.PEER_UNKNOWN
    assert "context_first" in failed.reason


async def test_broken_stream_to_a_peer_without_reconcile_ends_typed(sides: Sides):
    there, here = await sides.pair(OLDER, None)
    await connect(here, there)
    there.agent.hold = True
    there.offer(key(1), 1)
    here.ask(key(1), there.holder, 5)
    await until(lambda: sides.fabric.in_flight)
    await there.sever()
    told = await outcome(here)
    assert (told.settled, told.failure) == (False, TransferFailure.TIMED_OUT)
    await there.restore()
    there.kill_rank()
    found: list[ReceiveOutcome] = []
    await until(lambda: found.extend(here.scheduler.check_gen_transfer_status()) or found)
    assert found[0].settled


async def test_release_that_is_too_far_away_is_refused_with_both_values(sides: Sides):
    there, here = await sides.pair(TOO_NEW, None)
    here.hub.set_context_peers([there.address])
    await until(lambda: here.hub.pairs()[0].state is PairState.INCOMPATIBLE)
    (reason,) = here.hub.pairs()[0].incompatibilities
    assert (reason.field, reason.mine, reason.yours) == ("protocol_version", "1 to 1", "2 to 3")
    here.ask(key(1), there.holder, 5)
    refused = await outcome(here)
    assert "protocol_version" in refused.reason
