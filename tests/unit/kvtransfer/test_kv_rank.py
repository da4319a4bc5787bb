"""The rank role: every order ends in exactly one notice per destination, and a notice is never given too early."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest

from kv_storage import GUARD, Shape, Storage, instance
from kvtransfer.peer_plan import combine_digests, plan_digest
from kvtransfer.ports import (
    CancelWrite,
    Extent,
    ForgetPeer,
    RequestKey,
    TokenRange,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceRole
from rank_world import KEY, OTHER, World


@pytest.fixture
def world() -> World:
    return World()


def test_a_write_is_delivered_with_extents_and_costs(world: World):
    loaded = world.load()
    context = instance(world.rank.info, role=InstanceRole.CONTEXT, name="context-0")
    assert combine_digests([loaded.plan_digest]) == plan_digest(context, world.peer)
    world.rank.handle(world.order())
    notice = world.notice()
    assert (notice.key, notice.src_rank, notice.dst_rank) == (KEY, 0, 0)
    assert notice.outcome is WriterOutcome.DELIVERED
    assert set(notice.extents) == {Extent(0, view, TokenRange(0, 7), 0, 3) for view in (0, 1)}
    assert notice.stats.bytes == 2 * 6 * world.src.shape.buffer
    assert notice.stats.descriptors == 12
    assert notice.stats.path == "loopback"
    assert min(notice.stats.queue, notice.stats.plan, notice.stats.post, notice.stats.wire) > 0
    size = world.src.shape.buffer
    for source, target in ((1, 5), (2, 0)):
        for layer in range(3):
            a, b = GUARD + world.src.where(layer, 1, source), GUARD + world.dst.where(layer, 1, target)
            np.testing.assert_array_equal(world.dst.memory[b : b + size], world.src.memory[a : a + size])


def test_loading_twice_answers_the_same(world: World):
    assert world.load() == world.load()


def test_an_incompatible_peer_gets_every_reason(world: World):
    table = Storage(Shape(heads=3, unit=8, tokens_per_block=8), "slot_major", 4).page_table()
    rank = dataclasses.replace(world.peer.ranks[0], page_table=table)
    loaded = world.load(dataclasses.replace(world.peer, ranks=(rank,)))
    assert len(loaded.incompatibilities) >= 3
    assert loaded.plan_digest == b""
    world.rank.handle(world.order())
    assert world.notice().outcome is WriterOutcome.NEVER_STARTED


def test_an_unreachable_peer_is_refused_with_the_reason_and_can_be_tried_again(world: World):
    world.peer_agent.die()
    (reason,) = world.load().incompatibilities
    assert "no loopback agent" in reason.yours
    world.fabric.add(world.peer_agent)
    assert world.load().incompatibilities == ()


@pytest.mark.parametrize("changes", [{"instance_id": "other"}, {"incarnation": os.urandom(16)}])
def test_unknown_peers_are_never_written_to(world: World, changes):
    world.load()
    world.rank.handle(world.order(**changes))
    notice = world.notice()
    assert notice.outcome is WriterOutcome.NEVER_STARTED
    assert "not loaded" in notice.reason
    assert (world.dst.memory == 0xEE).all()


def test_one_notice_for_each_destination_rank(world: World):
    world.load()
    world.rank.handle(world.order(ranks=(0, 1)))
    first, second = world.notices()
    assert (first.dst_rank, first.outcome) == (0, WriterOutcome.DELIVERED)
    assert (second.dst_rank, second.outcome) == (1, WriterOutcome.NEVER_STARTED)


def test_bad_blocks_never_start(world: World):
    world.load()
    world.rank.handle(world.order(dst=(3, 3)))
    notice = world.notice()
    assert notice.outcome is WriterOutcome.NEVER_STARTED
    assert "twice" in notice.reason
    assert (world.dst.memory == 0xEE).all()


def test_an_empty_need_is_delivered_without_a_write(world: World):
    world.load()
    world.rank.handle(world.order(dst=(), tokens=TokenRange(4, 4)))
    notice = world.notice()
    assert (notice.outcome, notice.extents, notice.stats.bytes) == (WriterOutcome.DELIVERED, (), 0)


def test_cancel_before_the_post_never_starts(world: World):
    world.load()
    world.rank.handle(world.order())
    world.rank.handle(world.order(OTHER))
    world.rank.handle(CancelWrite(KEY))
    first, second = world.notices()
    assert (first.key, first.outcome) == (KEY, WriterOutcome.NEVER_STARTED)
    assert (second.key, second.outcome) == (OTHER, WriterOutcome.DELIVERED)


def test_cancel_after_the_post_waits_for_the_write(world: World):
    world.load()
    world.agent.hold = True
    world.rank.handle(world.order())
    world.rank.poll()
    world.rank.handle(CancelWrite(KEY))
    assert world.notices(polls=20) == []
    assert world.rank.open_writes == 1
    world.fabric.land()
    assert world.notice().outcome is WriterOutcome.DELIVERED


def test_a_failed_write_is_quiesced_with_the_reason_and_no_extents(world: World):
    world.load()
    world.agent.fail_next("cable")
    world.rank.handle(world.order())
    notice = world.notice()
    assert (notice.outcome, notice.reason, notice.extents) == (WriterOutcome.QUIESCED, "cable", ())
    assert notice.stats.bytes == 0


def test_a_lost_peer_is_connected_again_by_the_next_load(world: World):
    world.load()
    world.agent.hold = True
    world.rank.handle(world.order())
    world.rank.poll()
    world.peer_agent.die()
    world.fabric.land()
    assert world.notice().outcome is WriterOutcome.QUIESCED
    world.agent.hold = False
    assert world.load().incompatibilities != ()
    world.fabric.add(world.peer_agent)
    assert world.load().incompatibilities == ()
    world.rank.handle(world.order(OTHER))
    assert world.notice().outcome is WriterOutcome.DELIVERED


def test_a_repeated_order_is_written_once(world: World):
    world.load()
    world.agent.delay_polls = 3
    world.rank.handle(world.order())
    world.rank.poll()
    world.rank.handle(world.order())
    assert len(world.notices(polls=10)) == 1


def test_forget_ends_what_is_queued_and_waits_for_what_is_open(world: World):
    world.load()
    world.agent.hold = True
    world.rank.handle(world.order())
    world.rank.poll()
    world.rank.handle(world.order(OTHER))
    world.rank.handle(ForgetPeer(world.peer.instance_id, world.peer.incarnation))
    (never,) = world.notices()
    assert (never.key, never.outcome) == (OTHER, WriterOutcome.NEVER_STARTED)
    world.fabric.land()
    assert world.notice().outcome is WriterOutcome.DELIVERED
    world.rank.handle(world.order())
    assert world.notice().outcome is WriterOutcome.NEVER_STARTED
    world.rank.close()


def test_writes_are_posted_one_at_a_time(world: World):
    world.load()
    world.agent.hold = True
    for offset in range(3):
        world.rank.handle(world.order(RequestKey((1 << 40) + offset)))
    for posted in (1, 2, 3):
        assert world.rank.poll()
        assert world.fabric.in_flight == posted
