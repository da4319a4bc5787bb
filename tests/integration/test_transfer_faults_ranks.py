"""Ranks that are killed, stopped and replaced under large writes: what the ledger relies on, over real NIXL."""

from __future__ import annotations

import signal
import time

import pytest

from kv_storage import instance
from kvtransfer.ports import CancelWrite, RequestKey, WriterOutcome
from kvtransfer.rank_info import InstanceInfo
from rank_process import KEY, Rank, load, needs_nixl, notice_of, order

pytestmark = [pytest.mark.integration, needs_nixl]

# 256 blocks of 3 layers, K and V: 100 MB a write.
BLOCKS, UNIT = 256, 1 << 13
TCP = {"UCX_TLS": "tcp,self"}
# The default of the worker's transfer.drain_s.
DRAIN_S = 0.5


@pytest.fixture
def ranks():
    made: list[Rank] = []

    def make(*, blocks: int = BLOCKS, unit: int = UNIT, **environment: str) -> Rank:
        made.append(Rank("slot_major", blocks, unit, **environment))
        return made[-1]

    yield make
    for rank in made:
        rank.process.send_signal(signal.SIGCONT)
        rank.close()


def pair(ranks, environment: dict[str, str]) -> tuple[Rank, Rank, InstanceInfo]:
    writer, reader = ranks(**environment), ranks(**environment)
    writer.info()
    peer = reader.info()
    assert load(writer, peer).incompatibilities == ()
    writer.ask("paint")
    return writer, reader, peer


def whole(peer: InstanceInfo, number: int):
    """Turned a little further with every number: each write changes what the one before has written."""
    turned = [(block + number) % BLOCKS for block in range(BLOCKS - 1, -1, -1)]
    return order(peer, range(BLOCKS), turned, RequestKey(KEY.request_id + number))


def changed(reader: Rank, before: bytes) -> None:
    """Waits until a write has begun to land."""
    until = time.monotonic() + 20
    while reader.ask("digest") == before:
        assert time.monotonic() < until, "nothing landed"


def rests(reader: Rank) -> None:
    """Nothing lands any more."""
    time.sleep(DRAIN_S)
    seen = reader.ask("digest")
    time.sleep(DRAIN_S)
    assert reader.ask("digest") == seen


@pytest.mark.parametrize("environment", [{}, TCP], ids=["cma", "tcp"])
@pytest.mark.parametrize("stopped", [False, True], ids=["killed", "stopped and fenced"])
def test_nothing_lands_after_the_writer_has_been_reaped(ranks, environment, stopped):
    writer, reader, peer = pair(ranks, environment)
    before = reader.ask("digest")
    writer.send(*(whole(peer, number) for number in range(16)))
    changed(reader, before)
    if stopped:
        writer.process.send_signal(signal.SIGSTOP)
        # No proof of anything: a stopped writer may go on at any time.
        assert writer.process.poll() is None
    writer.process.send_signal(signal.SIGKILL)
    writer.process.wait(20)
    rests(reader)
    # The memory can be given to the next attempt, which another writer fills.
    other = ranks(**environment)
    other.info()
    assert load(other, peer).incompatibilities == ()
    other.send(whole(peer, 99))
    assert notice_of(other).outcome is WriterOutcome.DELIVERED


def test_a_stopped_reader_keeps_a_write_open_and_loses_nothing(ranks):
    writer, reader, peer = pair(ranks, TCP)
    reader.process.send_signal(signal.SIGSTOP)
    writer.send(whole(peer, 0))
    assert writer.silent(1.0), "a notice for a write that nobody can have received"
    reader.process.send_signal(signal.SIGCONT)
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED


def test_a_reader_killed_while_stopped_ends_the_write(ranks):
    writer, reader, peer = pair(ranks, TCP)
    reader.process.send_signal(signal.SIGSTOP)
    writer.send(whole(peer, 0))
    assert writer.silent(0.3)
    reader.process.send_signal(signal.SIGKILL)
    reader.process.wait(20)
    notice = notice_of(writer)
    assert notice.outcome is WriterOutcome.QUIESCED
    assert notice.extents == ()
    assert writer.close() == 0


@pytest.mark.parametrize("environment", [{}, TCP], ids=["cma", "tcp"])
def test_a_reader_that_comes_back_under_its_name_is_written_to(ranks, environment):
    writer, reader, peer = pair(ranks, environment)
    writer.send(whole(peer, 0))
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED
    reader.process.send_signal(signal.SIGKILL)
    reader.process.wait(20)
    again = ranks(**environment)
    successor = again.info()
    assert successor.instance_id == peer.instance_id
    assert successor.incarnation != peer.incarnation
    assert load(writer, successor).incompatibilities == ()
    writer.send(whole(successor, 1), whole(peer, 2))
    outcomes = {notice.key.request_id - KEY.request_id: notice.outcome for notice in map(notice_of, [writer] * 2)}
    assert outcomes[1] is WriterOutcome.DELIVERED
    assert outcomes[2] is not WriterOutcome.DELIVERED


def test_after_the_notices_of_cancelled_orders_nothing_lands(ranks):
    writer, reader, peer = pair(ranks, TCP)
    before = reader.ask("digest")
    keys = [RequestKey(KEY.request_id + number) for number in range(16)]
    writer.send(*(whole(peer, number) for number in range(16)))
    changed(reader, before)
    writer.send(*(CancelWrite(key) for key in keys))
    notices = [notice_of(writer) for _ in keys]
    assert {notice.key for notice in notices} == set(keys)
    assert any(notice.outcome is WriterOutcome.NEVER_STARTED for notice in notices), "the cancel overtook nothing"
    seen = reader.ask("digest")
    time.sleep(DRAIN_S)
    assert reader.ask("digest") == seen


def test_a_rank_of_another_incarnation_is_another_peer(ranks):
    writer, reader, peer = pair(ranks, {})
    same = instance(peer.ranks[0])
    assert same.instance_id == peer.instance_id
    writer.send(whole(same, 0))
    notice = notice_of(writer)
    assert notice.outcome is WriterOutcome.NEVER_STARTED
    assert "not loaded" in notice.reason
    assert reader.close() == 0
