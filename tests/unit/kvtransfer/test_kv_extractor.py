"""Where the bytes of blocks and slots are, and that nothing is multiplied out before somebody asks."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kv_storage import GUARD, Shape, Storage, rank_info
from kvtransfer.errors import GeometryError, PlanError
from kvtransfer.extractor import extract, extract_slot
from kvtransfer.page_table import (
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RecurrentGroup,
    RegisteredRegion,
    Section,
)
from kvtransfer.peer_plan import build_plan
from kvtransfer.ports import TokenRange
from kvtransfer.storage import describe_attention_pool

I32 = np.int32


@pytest.mark.parametrize("layout", ["slot_major", "layer_major"])
def test_every_buffer_of_every_block_is_found_and_minus_one_is_left_out(layout):
    storage = Storage(Shape(), layout, 8)
    regions = extract(np.array([5, -1, 2], I32), storage.page_table(), 0, 1)
    start = int(storage.memory.ctypes.data) + GUARD
    assert regions.addresses.tolist() == [start + storage.where(layer, 1, b) for layer in range(3) for b in (5, 2)]
    assert set(regions.lengths.tolist()) == {storage.shape.buffer}


def test_ids_outside_the_pool_are_refused():
    table = Storage(Shape(), "slot_major", 8).page_table()
    for wrong in (8, -2):
        with pytest.raises(PlanError, match=f"block {wrong} "):
            extract(np.array([0, wrong], I32), table, 0, 0)


def test_a_state_is_one_run_for_each_layer():
    view = PoolView(
        frozenset({"conv"}),
        MapperKind.SECTIONED,
        0,
        BufferEntries(np.arange(3, dtype=np.uint32), np.full(3, 8, np.uint64), np.full(3, 24, np.uint32)),
        sections=(Section("x", 0, 4, 4), Section("B", 0, 2, 4)),
    )
    pool = PhysicalPool(1 << 20, 32, 5)
    table = PageTable(
        (RegisteredRegion(1 << 20, 480, MemoryKind.DRAM),), (pool,), (RecurrentGroup((7, 8, 9), (view,)),)
    )
    table.validate()
    regions = extract_slot(2, table, 0, 0)
    assert regions.addresses.tolist() == [(1 << 20) + layer * 160 + 2 * 32 + 8 for layer in range(3)]
    assert regions.lengths.tolist() == [24] * 3


def pool(heads: HeadInterval, kind: MapperKind, layers: int = 4, blocks: int = 4096, base: int = 1 << 40) -> PageTable:
    block_bytes = layers * 2 * len(heads) * 32 * 16
    return describe_attention_pool(
        base_address=base,
        num_blocks=blocks,
        block_bytes=block_bytes,
        layers=range(layers),
        kv_heads=heads,
        tokens_per_block=32,
        kind=kind,
    )


def test_a_token_major_mismatch_is_not_written_out_before_somebody_asks():
    src, dst = pool(HeadInterval(0, 1), MapperKind.NHD), pool(HeadInterval(0, 2), MapperKind.NHD, base=1 << 41)
    plan, ids, tokens = build_plan(rank_info(src), rank_info(dst)), np.arange(4096, dtype=I32), TokenRange(0, 4096 * 32)
    transfer = plan.resolve({0: ids}, {0: ids}, tokens)
    held = sum(len(grid.src) + len(grid.src_off) for grid in transfer.grids)
    assert held < 5000
    assert transfer.fragments == 4 * 2 * tokens.end
    assert len(transfer.strided()) == 4 * 2 * 4096
    assert transfer.nbytes == transfer.fragments * 16


def test_very_many_runs_are_said_with_their_number(caplog):
    src, dst = pool(HeadInterval(0, 1), MapperKind.NHD), pool(HeadInterval(0, 2), MapperKind.NHD, base=1 << 41)
    plan, ids = build_plan(rank_info(src), rank_info(dst)), np.arange(512, dtype=I32)
    with caplog.at_level(logging.WARNING):
        plan.instantiate({0: ids[:64]}, {0: ids[:64]}, TokenRange(0, 64 * 32))
        assert not caplog.records
        plan.instantiate({0: ids}, {0: ids}, TokenRange(0, 512 * 32))
    (record,) = caplog.records
    assert vars(record)["fragments"] == 4 * 2 * 512 * 32


def test_windows_of_a_pool_become_layer_groups():
    table = describe_attention_pool(
        base_address=1 << 20,
        num_blocks=4,
        block_bytes=4 * 2 * 64,
        layers=(4, 5, 6, 7),
        kv_heads=HeadInterval(2, 4),
        tokens_per_block=4,
        windows=(None, 8, None, 8),
    )
    assert [(group.global_layer_ids, group.sliding_window) for group in table.groups] == [((4, 6), None), ((5, 7), 8)]
    starts = sorted(
        int(start) for g in (0, 1) for v in (0, 1) for start in extract(np.array([0], I32), table, g, v).addresses
    )
    assert starts == [(1 << 20) + 64 * i for i in range(8)]


def test_a_pool_whose_blocks_do_not_divide_is_refused():
    with pytest.raises(GeometryError):
        describe_attention_pool(
            base_address=1 << 20,
            num_blocks=4,
            block_bytes=2 * 33,
            layers=(0,),
            kv_heads=HeadInterval(0, 5),
            tokens_per_block=4,
        )
