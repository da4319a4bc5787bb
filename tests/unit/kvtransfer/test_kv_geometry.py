"""Page tables, ranks and settings that contradict themselves are refused, naming field and value."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kv_storage import LAYOUTS, Shape, Storage, entries, instance, rank_info
from kvtransfer.config import TransferConfig
from kvtransfer.errors import GeometryError, TransferConfigError
from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)
from kvtransfer.rank_info import AgentDescriptor, RankInfo, Topology

BASE = 1 << 20


def table(
    *views: BufferEntries,
    pool: PhysicalPool | None = None,
    regions: tuple[RegisteredRegion, ...] | None = None,
    kind: MapperKind = MapperKind.REPLICATED,
    layers: tuple[int, ...] = (0, 1),
    tokens_per_block: int = 4,
) -> PageTable:
    pool = pool or PhysicalPool(BASE, 64, 10, None, 0)
    regions = regions or (RegisteredRegion(BASE, 704, MemoryKind.DRAM),)
    made = tuple(PoolView(frozenset({str(i)}), kind, 0, one, HeadInterval(0, 3)) for i, one in enumerate(views))
    return PageTable(regions, (pool,), (AttentionGroup(layers, tokens_per_block, made),))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("regions", [1, 2, 5])
def test_real_layouts_are_valid(layout, regions):
    if layout == "slot_major_gaps" and regions > 1:
        regions = 1
    Storage(Shape(), layout, 6, regions).page_table().validate()


def test_smallest_valid_table():
    table(entries([0, 1], [0, 32], 32)).validate()


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (table(entries([0, 2], [0, 32], 32)), "the group has 2 layers"),
        (table(entries([0, 1], [0, 36], 32)), "leaves the slot"),
        (table(entries([0, 1], [0, 16], 32)), "share bytes"),
        (table(entries([0], [0], 32), entries([0], [28], 32)), "share bytes"),
        (table(entries([0, 1], [0, 32], 32), tokens_per_block=3), "do not divide evenly among 3"),
        (table(entries([0, 1], [0, 32], 32), kind=MapperKind.NHD), "do not divide evenly among 12"),
        (table(entries([0, 1], [0, 32], 32), kind=MapperKind.HND), "do not divide evenly among 12"),
        (table(entries([0], [0], 32), regions=(RegisteredRegion(BASE, 600, MemoryKind.DRAM),)), "slot 9"),
        (table(entries([0], [0], 32), regions=(RegisteredRegion(BASE + 1, 640, MemoryKind.DRAM),)), "slot 0"),
        (
            table(
                entries([0], [0], 32),
                regions=(
                    RegisteredRegion(BASE, 336, MemoryKind.DRAM),
                    RegisteredRegion(BASE + 336, 304, MemoryKind.DRAM),
                ),
            ),
            "slot 5",
        ),
        (
            table(
                entries([0], [0], 32),
                regions=(
                    RegisteredRegion(BASE, 640, MemoryKind.DRAM),
                    RegisteredRegion(BASE + 8, 8, MemoryKind.DRAM),
                ),
            ),
            "overlaps the region",
        ),
        (table(entries([0], [0], 32), pool=PhysicalPool(BASE, 64, 10, 1 << 60, 0)), "above 2\\^63"),
        (table(entries([0, 1], [0, 0], 32), pool=PhysicalPool(BASE, 64, 10, 64, 64)), "share bytes"),
        (PageTable((), (), ()), "at least one layer group"),
    ],
)
def test_contradictions_are_refused(bad, problem):
    with pytest.raises(GeometryError, match=problem):
        bad.validate()


def test_buffers_of_other_slots_count_as_overlap():
    # Layer 1 begins three slots further: it runs into slots 3.. of layer 0.
    with pytest.raises(GeometryError, match="share bytes"):
        table(entries([0, 1], [0, 0], 32), pool=PhysicalPool(BASE, 64, 7, 64, 192)).validate()
    table(entries([0, 1], [0, 0], 32), pool=PhysicalPool(BASE, 64, 3, 64, 192)).validate()


def test_a_layer_in_two_groups_is_refused():
    one = table(entries([0], [0], 32)).groups[0]
    two = PageTable((RegisteredRegion(BASE, 640, MemoryKind.DRAM),), (PhysicalPool(BASE, 64, 10, None, 0),), (one, one))
    with pytest.raises(GeometryError, match="earlier group"):
        two.validate()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RegisteredRegion(0, 1, MemoryKind.DRAM),
        lambda: RegisteredRegion(1, 0, MemoryKind.DRAM),
        lambda: RegisteredRegion(1 << 62, 1 << 62, MemoryKind.DRAM),
        lambda: PhysicalPool(1, 0, 1),
        lambda: PhysicalPool(1, 8, 0),
        lambda: PhysicalPool(1, 8, 1, 7),
        lambda: BufferEntries(np.zeros(1, np.int32), np.zeros(1, np.uint64), np.ones(1, np.uint32)),  # type: ignore
        lambda: BufferEntries(np.zeros(1, np.uint32), np.zeros(2, np.uint64), np.ones(1, np.uint32)),
        lambda: BufferEntries(np.zeros(1, np.uint32), np.zeros(1, np.uint64), np.zeros(1, np.uint32)),
        lambda: HeadInterval(1, 1),
        lambda: AttentionGroup((0, 0), 4, table(entries([0], [0], 4)).groups[0].views),
        lambda: Topology(tp_size=4, dp_size=3),
        lambda: Topology(tp_size=2, tp_rank=2),
        lambda: RankInfo(1, Topology(), table(entries([0], [0], 32)), AgentDescriptor("nixl", "a", b"")),
        lambda: instance(rank_info(table(entries([0], [0], 32)), 0, 2)),
        lambda: instance(rank_info(table(entries([0], [0], 32))), incarnation=b"short"),
    ],
)
def test_impossible_values_can_not_be_made(make):
    with pytest.raises(GeometryError):
        make()


def test_flat_rank_counts_pipeline_then_tensor_then_context():
    assert Topology(2, 4, 3, 2, 1, 2, 1).flat_rank == 1 * 12 + 2 * 3 + 1


def test_entries_are_immutable_copies():
    layer = np.zeros(1, np.uint32)
    made = BufferEntries(layer, np.zeros(1, np.uint64), np.ones(1, np.uint32))
    layer[0] = 9
    assert made.layer[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        made.size[0] = 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": ""},
        {"timeout_s": 0.0},
        {"handoff_hold_s": -1.0},
        {"drain_s": 61.0},
        {"max_open_requests": 0},
        {"max_block_ids": 1 << 31},
    ],
)
def test_settings_are_checked(wrong):
    good = TransferConfig("loopback")
    with pytest.raises(TransferConfigError, match=next(iter(wrong))):
        dataclasses.replace(good, **wrong)
