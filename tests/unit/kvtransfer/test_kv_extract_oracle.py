"""Addresses of blocks and slots against the loops of the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from kv_oracle.draw import seeded_case
from kv_oracle.model import Attention
from kv_oracle.world import build_world
from kvtransfer.extractor import extract, extract_slot


@pytest.mark.parametrize("seed", range(30))
def test_blocks_and_slots_lie_where_the_loops_say(seed):
    case = seeded_case(seed)
    world = build_world(case)
    for rank, lists in world.dst_lists.items():
        storage, table = world.dst.storages[rank], world.dst.info.ranks[rank].page_table
        for i, group in enumerate(storage.groups):
            slots = lists[group.group].slots
            for v, view in enumerate(group.views):
                expected: list[tuple[int, int]] = []
                seen: dict[int, int] = {}
                for position, _, size in view.entries:
                    nth = seen.get(position, 0)
                    seen[position] = nth + 1
                    buffer = storage.buffers[group.group, view.part, group.layers[position], nth]
                    expected += [(buffer.start + slot * buffer.stride, size) for slot in slots if slot >= 0]
                if isinstance(case.model.groups[group.group], Attention):
                    found = extract(np.array(slots, np.int32), table, i, v)
                else:
                    found = extract_slot(slots[0], table, i, v)
                assert list(zip(found.addresses.tolist(), found.lengths.tolist(), strict=True)) == expected
                assert found.nbytes == sum(size for _, size in expected)
