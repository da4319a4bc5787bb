"""Hand-offs between two real hubs over gRPC on localhost, loopback agents underneath."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hub_world import Side, assert_hubs_idle, connect, key, until
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.ports import TransferFailure
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration


class Pair:
    """One context and one generation instance."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.context = Side("context-0", InstanceRole.CONTEXT, self.fabric, drain_s=0.05, handoff_hold_s=20, ping_s=0.2)
        self.generation = Side(
            "generation-0", InstanceRole.GENERATION, self.fabric, layout="layer_major", drain_s=0.05, ping_s=0.2
        )
        self.received, self.sent = [], []

    async def received_any(self, count: int = 1):
        def poll() -> bool:
            self.received += self.generation.scheduler.check_gen_transfer_status()
            return len(self.received) >= count

        await until(poll)
        taken, self.received = self.received, []
        return taken

    async def sent_any(self, count: int = 1):
        def poll() -> bool:
            self.sent += self.context.scheduler.check_context_transfer_status()
            return len(self.sent) >= count

        await until(poll)
        taken, self.sent = self.sent, []
        return taken

    async def idle(self) -> None:
        await self.context.hub.drain(10)
        await self.generation.hub.drain(10)
        assert self.fabric.in_flight == 0
        assert_hubs_idle([self.context, self.generation])


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    await pair.context.start()
    await pair.generation.start()
    await connect(pair.generation, pair.context)
    yield pair
    await pair.generation.stop()
    await pair.context.stop()


async def test_cache_arrives_byte_for_byte(pair: Pair):
    pair.context.offer(key(1), 3, 7, 1)
    pair.generation.ask(key(1), pair.context.holder, 9, 0, 12)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.NONE)
    assert pair.generation.block_bytes(9, 0, 12) == pair.context.block_bytes(3, 7, 1)
    assert outcome.stats is not None
    assert outcome.stats.writers.bytes == 3 * pair.context.storage.slot
    assert outcome.stats.writers.path == "loopback"
    assert outcome.stats.total > 0
    (sent,) = await pair.sent_any()
    assert (sent.key, sent.failure) == (key(1), TransferFailure.NONE)
    await pair.idle()


async def test_many_at_once_do_not_mix(pair: Pair):
    count = 20
    for i in range(count):
        pair.context.offer(key(i), 2 * i, 2 * i + 1, seed=i)
        pair.generation.ask(key(i), pair.context.holder, 63 - 2 * i, 62 - 2 * i)
    outcomes = await pair.received_any(count)
    assert {outcome.key for outcome in outcomes} == {key(i) for i in range(count)}
    assert all(outcome.settled and outcome.failure is TransferFailure.NONE for outcome in outcomes)
    for i in range(count):
        assert pair.generation.block_bytes(63 - 2 * i, 62 - 2 * i) == pair.context.block_bytes(2 * i, 2 * i + 1)
    assert len(await pair.sent_any(count)) == count
    await pair.idle()


async def test_cancelled_pages_stay_until_the_write_is_over(pair: Pair):
    pair.context.agent.hold = True
    pair.context.offer(key(1), 1)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: pair.fabric.in_flight)
    assert pair.generation.scheduler.cancel_request(key(1)) is False
    await until(lambda: [view.state for view in pair.generation.hub.sessions()] == ["failing"])
    await until(lambda: [view.state for view in pair.context.hub.sessions()] == ["cancelling"])
    assert pair.generation.scheduler.check_gen_transfer_status() == []
    assert pair.generation.scheduler.cancel_request(key(1)) is False
    pair.fabric.land()
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.CANCELLED)
    assert pair.generation.scheduler.cancel_request(key(1)) is True
    # Everything was delivered all the same: the context side has nothing to complain about.
    (sent,) = await pair.sent_any()
    assert sent.failure is TransferFailure.NONE
    await pair.idle()


async def test_cancel_before_the_post_writes_nothing(pair: Pair):
    pair.context.frozen = True
    pair.context.offer(key(1), 1)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: [view.state for view in pair.context.hub.sessions()] == ["writing"])
    pair.generation.scheduler.cancel_request(key(1))
    await until(lambda: [view.state for view in pair.context.hub.sessions()] == ["cancelling"])
    before = pair.generation.storage.memory.copy()
    pair.context.frozen = False
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.CANCELLED)
    (sent,) = await pair.sent_any()
    assert sent.failure is TransferFailure.CANCELLED
    assert (pair.generation.storage.memory == before).all()
    await pair.idle()


async def test_pages_that_were_never_offered_are_said_to_be_not_held(pair: Pair):
    pair.generation.ask(key(1), pair.context.holder, 5)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.NOT_HELD)
    # What was answered is never started later: the offer ends at once, without a write.
    pair.context.offer(key(1), 1)
    (sent,) = await pair.sent_any()
    assert sent.failure is TransferFailure.CANCELLED
    await pair.idle()


async def test_withdrawn_offer_is_not_held(pair: Pair):
    pair.context.offer(key(1), 1)
    assert pair.context.scheduler.cancel_request(key(1)) is False
    (sent,) = await pair.sent_any()
    assert sent.failure is TransferFailure.CANCELLED
    pair.generation.ask(key(1), pair.context.holder, 5)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.NOT_HELD)
    assert "withdrawn" in outcome.reason
    await pair.idle()


async def test_failed_write_is_typed_on_both_sides(pair: Pair):
    pair.context.agent.fail_next("link down")
    pair.context.offer(key(1), 1, 4)
    pair.generation.ask(key(1), pair.context.holder, 5, 9)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.WRITE_FAILED)
    assert "link down" in outcome.reason
    (sent,) = await pair.sent_any()
    assert (sent.failure, sent.reason) == (TransferFailure.WRITE_FAILED, "link down")
    await pair.idle()


async def test_stream_break_during_the_write_is_reconciled(pair: Pair):
    pair.context.agent.hold = True
    pair.context.offer(key(1), 1)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: pair.fabric.in_flight)
    await pair.context.sever()
    await until(pair.generation.hub.in_doubt_pages)
    # The last word is lost with the old stream: only Reconcile can bring it back.
    pair.fabric.land()
    (sent,) = await pair.sent_any()
    assert sent.failure is TransferFailure.NONE
    assert pair.generation.scheduler.check_gen_transfer_status() == []
    await pair.context.restore()
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.NONE)
    assert pair.generation.block_bytes(5) == pair.context.block_bytes(1)
    await pair.idle()


async def test_stream_break_and_reconnect_while_the_write_goes_on(pair: Pair):
    pair.context.agent.hold = True
    pair.context.offer(key(1), 1)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: pair.fabric.in_flight)
    await pair.context.sever()
    await until(pair.generation.hub.in_doubt_pages)
    pair.generation.scheduler.cancel_request(key(1))
    await pair.context.restore()
    await until(lambda: [view.state for view in pair.context.hub.sessions()] == ["cancelling"])
    assert pair.generation.hub.in_doubt_pages() == 0
    assert pair.generation.scheduler.check_gen_transfer_status() == []
    pair.fabric.land()
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.CANCELLED)
    await pair.sent_any()
    await pair.idle()


async def test_request_waits_for_a_stream_that_is_being_opened(pair: Pair):
    await pair.context.sever()
    await until(lambda: pair.generation.hub.pairs()[0].state.name == "CONNECTING")
    pair.context.offer(key(1), 1)
    pair.generation.ask(key(1), pair.context.holder, 5)
    assert [view.state for view in pair.generation.hub.sessions()] == ["queued"]
    await pair.context.restore()
    (outcome,) = await pair.received_any()
    assert outcome.failure is TransferFailure.NONE
    await pair.sent_any()
    await pair.idle()


async def test_killed_context_rank_settles_after_its_exit_report(pair: Pair):
    pair.context.agent.hold = True
    pair.context.offer(key(1), 1)
    pair.context.offer(key(2), 2)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: pair.fabric.in_flight)
    pair.context.kill_rank()
    (told,) = await pair.received_any()
    assert (told.settled, told.failure) == (False, TransferFailure.PEER_LOST)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.PEER_LOST)
    assert "signal 9" in outcome.reason
    sent = await pair.sent_any(2)
    # The peer may have cancelled its own before the rank's writes were over.
    assert {one.failure for one in sent} <= {TransferFailure.WRITE_FAILED, TransferFailure.CANCELLED}
    # Who asks later hears that the pages died with their rank.
    pair.generation.ask(key(2), pair.context.holder, 6)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.WRITE_FAILED)
    assert "signal 9" in outcome.reason
    await pair.context.hub.drain(10)
    await pair.generation.hub.drain(10)
    pair.fabric.land()


@pytest.mark.parametrize("proven", [True, False])
async def test_restarted_context_settles_only_with_proof(pair: Pair, proven: bool):
    pair.context.agent.hold = True
    pair.context.offer(key(1), 1)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: pair.fabric.in_flight)
    await pair.context.stop()
    exited = (pair.context.incarnation,) if proven else ()
    successor = Side("context-0", InstanceRole.CONTEXT, pair.fabric, exited=exited)
    await successor.start()
    try:
        await connect(pair.generation, successor)
        (outcome,) = await pair.received_any(1)
        assert (outcome.settled, outcome.failure) == (False, TransferFailure.PEER_LOST)
        # New work goes to the successor at once, whatever happens to the old pages.
        successor.offer(key(2), 3)
        pair.generation.ask(key(2), successor.holder, 6)
        outcomes = await pair.received_any(2 if proven else 1)
        assert [one.failure for one in outcomes if one.key == key(2)] == [TransferFailure.NONE]
        if proven:
            settled = next(one for one in outcomes if one.key == key(1))
            assert (settled.settled, settled.failure) == (True, TransferFailure.PEER_LOST)
            assert pair.generation.hub.is_idle()
        else:
            assert pair.generation.hub.in_doubt_pages() == 1
            assert pair.generation.scheduler.cancel_request(key(1)) is False
    finally:
        await successor.stop()
        pair.fabric.land()


async def test_unknown_peer_is_refused_at_once(pair: Pair):
    stranger = pair.context.holder.__class__("127.0.0.1:1", "context-9", bytes(16))
    pair.generation.ask(key(1), stranger, 5)
    (outcome,) = await pair.received_any()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.PEER_UNKNOWN)
    await pair.idle()


async def test_peer_that_is_not_announced_any_more_takes_no_new_requests(pair: Pair):
    pair.context.agent.hold = True
    pair.context.offer(key(1), 1)
    pair.context.offer(key(2), 2)
    pair.generation.ask(key(1), pair.context.holder, 5)
    await until(lambda: pair.fabric.in_flight)
    pair.generation.hub.set_context_peers([])
    assert pair.generation.hub.pairs() == []
    pair.generation.ask(key(2), pair.context.holder, 6)
    (outcome,) = await pair.received_any()
    assert (outcome.key, outcome.failure) == (key(2), TransferFailure.PEER_UNKNOWN)
    # What it was writing is heard to the end.
    pair.fabric.land()
    (outcome,) = await pair.received_any()
    assert (outcome.key, outcome.failure) == (key(1), TransferFailure.NONE)
    pair.context.scheduler.cancel_request(key(2))
    await pair.sent_any(2)
    await pair.idle()


async def test_idle_streams_stay_open(pair: Pair):
    # Several probe intervals; a stream that is cut would show in the log of pairs.
    await until(lambda: pair.context.hub.core.context.stream_of((pair.generation.name, pair.generation.incarnation)))
    log = list(pair.generation.pair_log)
    await asyncio.sleep(1.2)
    assert pair.generation.pair_log == log


async def test_drain_names_what_is_left(pair: Pair):
    pair.context.offer(key(1), 1)
    with pytest.raises(TimeoutError, match="offered"):
        await pair.context.hub.drain(0.05)
    pair.context.scheduler.cancel_request(key(1))
    await pair.context.hub.drain(10)
    await pair.sent_any()
    await pair.idle()
