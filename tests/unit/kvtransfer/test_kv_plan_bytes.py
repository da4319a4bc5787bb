"""Plans against a slow oracle: every byte arrives once, at its place, and nothing else is touched."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_storage import GUARD, LAYOUTS, Shape, Storage, instance, rank_info
from kvtransfer.agents.base import WriteState
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.errors import PlanError
from kvtransfer.peer_plan import (
    build_instance_plans,
    build_plan,
    combine_digests,
    expected_extents,
    expected_need,
    plan_digest,
    rank_digest,
)
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole

I32 = np.int32


def write(src: Storage, dst: Storage, src_blocks, dst_blocks, tokens: TokenRange):
    """Plans, sends through two loopback agents, returns the runs."""
    fabric = LoopbackFabric()
    writer, reader = LoopbackAgent("src", fabric), LoopbackAgent("dst", fabric)
    left, right = src.page_table(), dst.page_table()
    left.validate()
    right.validate()
    pairs = build_plan(rank_info(left), rank_info(right)).instantiate({0: src_blocks}, {0: dst_blocks}, tokens)
    writer.register(left.regions)
    reader.register(right.regions)
    writer.load_remote(reader.descriptor(), right.regions)
    if len(pairs):
        handle = writer.submit(pairs, reader.name)
        assert writer.poll(handle).state is WriteState.DONE
        writer.release(handle)
    return pairs


def expected_memory(src: Storage, dst: Storage, src_blocks, dst_blocks, tokens: TokenRange) -> np.ndarray:
    """Oracle: copies token by token, head by head, whole blocks from the block of tokens.begin on."""
    memory, shape = dst.memory.copy(), dst.shape
    first = tokens.begin // shape.tokens_per_block
    for ordinal, target in enumerate(dst_blocks.tolist()):
        if target == -1:
            continue
        source = int(src_blocks[first + ordinal])
        for layer in range(len(shape.layers)):
            for kv in (0, 1):
                for token in range(shape.tokens_per_block):
                    for head in range(shape.heads):
                        inner = (token * shape.heads + head) * shape.unit
                        a = GUARD + src.where(layer, kv, source) + inner
                        b = GUARD + dst.where(layer, kv, target) + inner
                        memory[b : b + shape.unit] = src.memory[a : a + shape.unit]
    return memory


@st.composite
def transfers(draw):
    shape = Shape(
        layers=tuple(draw(st.permutations([3, 4, 5, 9]))[: draw(st.integers(1, 4))]),
        heads=draw(st.integers(1, 3)),
        unit=draw(st.sampled_from([1, 4, 6])),
        tokens_per_block=draw(st.integers(1, 4)),
    )
    layouts = ("one_view",) * 2 if draw(st.booleans()) else draw(st.tuples(*[st.sampled_from(LAYOUTS[:4])] * 2))
    src, dst = (
        Storage(shape, layout, draw(st.integers(8, 12)), 1 if "gaps" in layout else draw(st.sampled_from([1, 3])))
        for layout in layouts
    )
    count = draw(st.integers(0, 7))
    end = (
        0 if count == 0 else draw(st.integers((count - 1) * shape.tokens_per_block + 1, count * shape.tokens_per_block))
    )
    first = draw(st.integers(0, count))
    begin = min(first * shape.tokens_per_block, end)
    in_order = draw(st.booleans())

    def ids(storage: Storage, length: int) -> np.ndarray:
        picked = draw(st.permutations(range(storage.blocks)))[:length]
        return np.array(sorted(picked) if in_order else picked, I32)

    src_blocks = ids(src, count)
    needed = -(-end // shape.tokens_per_block) - begin // shape.tokens_per_block if end > begin else 0
    dst_blocks = ids(dst, needed)
    for ordinal in range(needed):
        if draw(st.integers(0, 9)) == 0:
            dst_blocks[ordinal] = -1
    return src, dst, src_blocks, dst_blocks, TokenRange(begin, end)


@settings(max_examples=250, deadline=None)
@given(transfers())
def test_bytes_arrive_once_and_nothing_else_is_touched(case):
    src, dst, src_blocks, dst_blocks, tokens = case
    src.fill(src_blocks, seed=7)
    want = expected_memory(src, dst, src_blocks, dst_blocks, tokens)
    before = src.memory.copy()
    pairs = write(src, dst, src_blocks, dst_blocks, tokens)
    np.testing.assert_array_equal(dst.memory, want)
    np.testing.assert_array_equal(src.memory, before)
    named = int((dst_blocks >= 0).sum())
    assert pairs.nbytes == named * 2 * len(src.shape.layers) * src.shape.buffer
    spans = sorted(zip(pairs.dst.tolist(), (pairs.dst + pairs.lengths).tolist(), strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "a byte has two writers"


@settings(max_examples=100, deadline=None)
@given(transfers())
def test_runs_are_maximal_and_stay_inside_regions(case):
    src, dst, src_blocks, dst_blocks, tokens = case
    pairs = write(src, dst, src_blocks, dst_blocks, tokens)

    def region(storage: Storage, address: int, length: int) -> int:
        found = [
            i
            for i, one in enumerate(storage.page_table().regions)
            if one.base_address <= address and address + length <= one.end
        ]
        assert len(found) == 1, "a run crosses the border of a registered region"
        return found[0]

    runs = sorted(zip(pairs.src.tolist(), pairs.dst.tolist(), pairs.lengths.tolist(), strict=True))
    places = [(region(src, s, n), region(dst, d, n)) for s, d, n in runs]
    for (a, b), (p, q) in zip(itertools.pairwise(runs), itertools.pairwise(places), strict=True):
        touching = a[0] + a[2] == b[0] and a[1] + a[2] == b[1]
        assert not (touching and p == q), "two runs that follow each other on both sides were not merged"


@pytest.mark.parametrize(
    ("src", "dst", "src_ids", "dst_ids", "runs"),
    [
        ("slot_major", "slot_major", [2, 3, 4, 5], [0, 1, 2, 3], 1),
        ("slot_major", "slot_major", [2, 3, 5, 6], [0, 1, 2, 3], 2),
        ("slot_major", "slot_major", [3, 2, 1, 0], [7, 6, 5, 4], 1),
        ("slot_major", "slot_major", [0, 1, 2, 3], [3, 2, 1, 0], 4),
        ("layer_major", "layer_major", [2, 3, 4, 5], [0, 1, 2, 3], 6),
        ("layer_major", "slot_major", [0, 1, 2, 3], [0, 1, 2, 3], 24),
        ("slot_major", "slot_major_gaps", [0, 1, 2, 3], [0, 1, 2, 3], 24),
    ],
)
def test_number_of_runs(src, dst, src_ids, dst_ids, runs):
    shape = Shape()
    pairs = write(
        Storage(shape, src, 8),
        Storage(shape, dst, 8),
        np.array(src_ids, I32),
        np.array(dst_ids, I32),
        TokenRange(0, 14),
    )
    assert len(pairs) == runs


def test_whole_pools_of_equal_layer_major_storage_are_one_run_a_layer_and_role():
    storage = Storage(Shape(), "layer_major", 4), Storage(Shape(), "layer_major", 4)
    every = np.arange(4, dtype=I32)
    assert len(write(*storage, every, every, TokenRange(0, 16))) == 3 * 2


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "tokens", "problem"),
    [
        ([0, 1], [0, 8], TokenRange(0, 8), "names block 8"),
        ([0, 1], [0, -2], TokenRange(0, 8), "names block -2"),
        ([0, 8], [0, 1], TokenRange(0, 8), "names block 8"),
        ([0, 1], [3, 3], TokenRange(0, 8), "block 3 twice"),
        ([0, 1], [0, 1, 2], TokenRange(0, 8), "lists 3 blocks"),
        ([0, 1], [0], TokenRange(0, 5), "lists 1 blocks"),
        ([0], [0, 1], TokenRange(0, 5), "lists 1 blocks"),
        ([0, -1], [0, 1], TokenRange(0, 8), "no longer holds block 1"),
    ],
)
def test_bad_block_lists_are_refused_before_anything_moves(src_ids, dst_ids, tokens, problem):
    src, dst = Storage(Shape(), "slot_major", 8), Storage(Shape(), "slot_major", 8)
    before = dst.memory.copy()
    with pytest.raises(PlanError, match=problem):
        write(src, dst, np.array(src_ids, I32), np.array(dst_ids, I32), tokens)
    np.testing.assert_array_equal(dst.memory, before)


def test_layers_meet_by_global_id_not_by_position():
    src = Storage(Shape(layers=(0, 1, 2)), "slot_major", 4)
    dst = Storage(Shape(layers=(2, 0, 1)), "layer_major", 4)
    src.fill(np.array([1], I32), seed=3)
    write(src, dst, np.array([1], I32), np.array([2], I32), TokenRange(0, 4))
    size = src.shape.buffer
    for layer, position in ((0, 1), (1, 2), (2, 0)):
        for kv in (0, 1):
            a, b = GUARD + src.where(layer, kv, 1), GUARD + dst.where(position, kv, 2)
            np.testing.assert_array_equal(dst.memory[b : b + size], src.memory[a : a + size])


def test_missing_or_mistyped_lists_are_refused():
    table = Storage(Shape(), "slot_major", 8).page_table()
    plan, ids, tokens = build_plan(rank_info(table), rank_info(table)), np.arange(2, dtype=I32), TokenRange(0, 8)
    for src, dst in (({}, {0: ids}), ({0: ids}, {}), ({0: ids.astype(np.int64)}, {0: ids})):
        with pytest.raises(PlanError):
            plan.instantiate(src, dst, tokens)


def test_two_groups_of_one_pool_may_not_be_sent_to_the_same_block():
    table = Storage(Shape(layers=(0, 1)), "slot_major", 8).page_table()
    second = dataclasses.replace(table.groups[0], global_layer_ids=(2, 3))
    info = rank_info(dataclasses.replace(table, groups=(table.groups[0], second)))
    plan, tokens = build_plan(info, info), TokenRange(0, 4)
    src = {0: np.array([0], I32), 1: np.array([1], I32)}
    assert (
        plan.instantiate(src, {0: np.array([4], I32), 1: np.array([5], I32)}, tokens).nbytes
        == 2 * table.pools[0].slot_bytes
    )
    with pytest.raises(PlanError, match="share memory and both name block 4"):
        plan.instantiate(src, {0: np.array([4], I32), 1: np.array([4], I32)}, tokens)


def test_nothing_to_write_needs_no_lists():
    table = Storage(Shape(), "slot_major", 8).page_table()
    plan = build_plan(rank_info(table), rank_info(table))
    assert len(plan.instantiate({}, {}, TokenRange(4, 4))) == 0
    assert expected_extents(plan, TokenRange(4, 4)) == ()


def pair(src_layout: str, dst_layout: str, tp: int = 2):
    shape = Shape(layers=(0, 1, 4))
    context = instance(
        *(rank_info(Storage(shape, src_layout, 8).page_table(), r, tp) for r in range(tp)),
        role=InstanceRole.CONTEXT,
        name="context-0",
    )
    generation = instance(*(rank_info(Storage(shape, dst_layout, 5).page_table(), r, tp) for r in range(tp)))
    return context, generation


def test_digest_is_equal_on_both_sides_and_blind_to_runs():
    context, generation = pair("slot_major", "layer_major")
    plans = build_instance_plans(context, generation)
    by_rank = [rank_digest(plan for plan in plans if plan.src_rank == rank) for rank in (0, 1)]
    assert combine_digests(by_rank) == plan_digest(context, generation)
    assert plan_digest(*pair("slot_major", "slot_major_gaps")) == plan_digest(context, generation)
    assert by_rank[0] != by_rank[1]
    assert plan_digest(*pair("slot_major", "slot_major", tp=1)) != plan_digest(context, generation)


def test_need_lists_intervals_of_every_view():
    plans = build_instance_plans(*pair("slot_major", "layer_major", tp=1))
    need = expected_need(plans, TokenRange(0, 9))
    assert need.writers == ((0, 0),)
    spans = {(e.view, e.layer_begin, e.layer_end) for e in need.extents[0, 0]}
    assert spans == {(0, 0, 2), (0, 4, 5), (1, 0, 2), (1, 4, 5)}
    assert expected_need(plans, TokenRange(8, 8)).writers == ()
