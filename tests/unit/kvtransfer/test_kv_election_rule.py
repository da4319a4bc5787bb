"""Where heads begin when tensor parallelism divides, and how evenly replicas share the work of many peers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kv_oracle.named import attention, deploy, prompt_of
from kv_oracle.tables import Instance, build_instance
from kv_oracle.world import arrays, build_world
from kvtransfer.peer_plan import PeerPlan, build_rank_plans, plan_digest
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole

UNIT = 4  # bytes of one token of one head in `attention()`


def closed_form(peer_rank: int, peer_tp: int, local_heads: int, local_tp: int) -> int:
    """The head, counted from the first local one, at which the peer's share begins."""
    return (peer_rank * local_heads * local_tp) // peer_tp % local_heads


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("peer_tp", [1, 2, 4, 8])
def test_head_offsets_follow_the_closed_form_where_tp_divides(heads, tp, dp, peer_tp):
    model = attention(layers=1, heads=heads)
    case = prompt_of(model, deploy(model, tp=tp, dp=dp, layout="hnd"), deploy(model, tp=peer_tp, layout="hnd"), 4)
    world = build_world(case)
    met = 0
    for rank in world.src.holders:
        for plan in build_rank_plans(world.src.info.ranks[rank], world.dst.info, world.src.info.ranks):
            head = first_head(world, plan)
            assert head == closed_form(plan.dst_rank, peer_tp, heads // tp, tp)
            met += 1
    assert met == max(tp, peer_tp)


def first_head(world, plan: PeerPlan) -> int:
    """Where in the source's first buffer the plan begins to read, in heads."""
    src, dst = (arrays(side, rank, lists[rank]) for side, rank, lists in _sides(world, plan))
    pairs = plan.instantiate(src[0], dst[0], TokenRange(0, 4))
    lists, storage = world.src_lists[plan.src_rank], world.src.storages[plan.src_rank]
    buffer = storage.buffers[0, 0, 0, 0]
    start = buffer.start + lists[0].slots[0] * buffer.stride
    inside = pairs.src[(pairs.src >= start) & (pairs.src < start + buffer.size)]
    offset = int(inside.min()) - start
    assert offset % (4 * UNIT) == 0
    return offset // (4 * UNIT)


def _sides(world, plan: PeerPlan):
    yield world.src, plan.src_rank, world.src_lists
    yield world.dst, plan.dst_rank, world.dst_lists


def test_with_8_heads_and_tp8_in_4_dp_groups_peer_1_of_tp4_starts_at_head_2():
    assert closed_form(peer_rank=1, peer_tp=4, local_heads=4, local_tp=2) == 2


@pytest.mark.parametrize("layers", [8, 61])
def test_100_peers_load_8_replicated_sources_evenly(layers):
    model = attention(layers=layers, heads=0)
    context = side(model, InstanceRole.CONTEXT, "context-0", tp=8)
    load: Counter[int] = Counter()
    for number in range(100):
        peer = side(model, InstanceRole.GENERATION, f"generation-{number}").info
        for rank in context.info.ranks:
            for plan in build_rank_plans(rank, peer, context.info.ranks):
                blocks = {0: np.zeros(1, np.int32)}
                load[rank.rank] += plan.instantiate(blocks, blocks, TokenRange(0, 4)).nbytes
    assert len(load) == 8
    assert max(load.values()) <= 1.3 * min(load.values()), load


def test_older_peers_elect_by_their_dp_rank_alone():
    model = attention(layers=5, heads=0)
    context = side(model, InstanceRole.CONTEXT, "context-0", tp=4)
    generation = side(model, InstanceRole.GENERATION, "generation-0", dp=6)
    for rank in context.info.ranks:
        plans = build_rank_plans(rank, generation.info, context.info.ranks, seed_compat=True)
        assert [plan.dst_rank for plan in plans] == [dst for dst in range(6) if dst % 4 == rank.rank]


def side(model, role: InstanceRole, name: str, **options) -> Instance:
    return build_instance(model, deploy(model, **options), (2,) * len(model.groups), role, name)


def test_the_name_of_the_destination_moves_the_writers():
    model = attention(layers=1, heads=0)
    context = side(model, InstanceRole.CONTEXT, "context-0", tp=8)
    generation = side(model, InstanceRole.GENERATION, "generation-0").info
    writers = set[int]()
    for number in range(32):
        peer = replace(generation, instance_id=f"other-{number}")
        writers |= {rank.rank for rank in context.info.ranks if build_rank_plans(rank, peer, context.info.ranks)}
    assert len(writers) == 8


def digest(*, seed_compat: bool = False, name: str = "generation-0", model=None, src=None, dst=None) -> bytes:
    model = model or attention(layers=3, heads=2)
    context = side(model, InstanceRole.CONTEXT, "context-0", **{"tp": 4, **(src or {})}).info
    generation = side(model, InstanceRole.GENERATION, name, **(dst or {})).info
    return plan_digest(context, generation, seed_compat=seed_compat)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({"pools": "layer_pools"}, {}),
        ({"cuts": "many"}, {"cuts": "pool", "pools": "part_pools"}),
        ({"layout": "hnd"}, {"layout": "hnd"}),
        ({}, {"block": 8}),
    ],
)
def test_the_digest_does_not_see_where_bytes_lie(src, dst):
    assert digest(src=src, dst={"block": 4, **dst}) == digest()


def test_the_digest_sees_who_writes_what():
    values = [
        digest(),
        digest(seed_compat=True),
        digest(src={"tp": 2}),
        digest(src={"tp": 1}),
        digest(dst={"tp": 2}),
        digest(dst={"pp": 2}),
        digest(model=attention(layers=3, heads=4)),
        digest(model=attention(layers=4, heads=2)),
        digest(src={"cp": 2, "sharding": ("zigzag", 4)}),
        digest(src={"cp": 2, "sharding": ("zigzag", 8)}),
        digest(src={"cp": 2, "sharding": ("interleaved", 4)}),
    ]
    assert len(set(values)) == len(values)
    assert len({digest(name=f"generation-{number}") for number in range(8)}) > 1
