"""Envelopes: what is queued leaves together, in order, within limits."""

from __future__ import annotations

import asyncio

import numpy as np
from isthmus.v1.kv_transfer_service_pb2 import ConnectRequest

from hub_world import key
from kvtransfer.hub import outbox as module
from kvtransfer.hub.outbox import Outbox
from kvtransfer.messages import KvRequest, Ping
from kvtransfer.ports import RankBlocks, TokenRange, TransferNotice, WriterOutcome
from kvtransfer.session.actions import EndReason

ME = b"m" * 16


async def batches(outbox: Outbox) -> list[list[int]]:
    outbox.end(EndReason.UNNEEDED, "enough")
    found: list[list[int]] = []
    while await outbox.ready():
        envelope = ConnectRequest()
        outbox.take(envelope)
        found.append([message.ping.nonce for message in envelope.messages])
    return found


async def test_everything_queued_leaves_in_one_envelope():
    outbox = Outbox()
    for nonce in range(10):
        outbox.say(Ping(nonce), ME)
    assert outbox.dst_incarnation == ME
    assert await batches(outbox) == [list(range(10))]


async def test_no_more_than_64_messages():
    outbox = Outbox()
    for nonce in range(130):
        outbox.say(Ping(nonce), ME)
    assert [len(batch) for batch in await batches(outbox)] == [64, 64, 2]


async def test_no_more_than_one_mebibyte_unless_one_message_is_larger():
    outbox = Outbox()
    for blocks in (100_000, 100_000, 100_000, 400_000, 10):
        lists = (RankBlocks(0, 0, np.zeros(blocks, np.int32)),)
        outbox.say(KvRequest(key(1), TokenRange(0, 1), lists), ME)
    assert [len(batch) for batch in await batches(outbox)] == [2, 1, 1, 1]


async def test_waiting_ends_with_the_first_message():
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.ready())
    await asyncio.sleep(0)
    outbox.say(Ping(1), ME)
    assert await waiting
    envelope = ConnectRequest()
    outbox.take(envelope)
    assert len(envelope.messages) == 1
    assert envelope.dst_incarnation == ME
    # Taken is not written yet: only the next call says so.
    assert outbox.waiting == 1
    outbox.end(EndReason.UNNEEDED, "first")
    outbox.end(EndReason.PROTOCOL, "second")
    outbox.say(Ping(2), ME)
    assert not await outbox.ready()
    assert outbox.waiting == 0
    assert outbox.ended == (EndReason.UNNEEDED, "first")


async def test_peer_that_does_not_read_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 5)
    outbox = Outbox()
    for nonce in range(9):
        outbox.say(Ping(nonce), ME)
    assert outbox.ended is not None
    assert outbox.ended[0] is EndReason.UNAVAILABLE
    assert not await outbox.ready()


async def test_notices_leave_as_one_message_and_count_each():
    outbox = Outbox()
    for rank in range(100):
        outbox.say(TransferNotice(key(1), rank, rank, WriterOutcome.DELIVERED), ME)
    counts: list[list[int]] = []
    outbox.end(EndReason.UNNEEDED, "enough")
    while await outbox.ready():
        envelope = ConnectRequest()
        outbox.take(envelope)
        counts.append([message.transfer_notices.count for message in envelope.messages])
    assert counts == [[64], [36]]


async def test_answers_leave_before_the_reader_asks_for_more():
    outbox, order = Outbox(), list[str]()

    async def write() -> None:
        while await outbox.ready():
            outbox.take(ConnectRequest())
            order.append("written")

    async def read() -> None:
        for nonce in range(2):
            outbox.say(Ping(nonce), ME)
            await outbox.gets_its_turn()
            order.append("asks for more")
        await outbox.gets_its_turn()
        outbox.end(EndReason.UNNEEDED, "enough")

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    await read()
    await writer
    assert order == ["written", "asks for more"] * 2
