"""Chunks by layers: together every packed byte once, and each carries no byte of a layer that it does not wait for."""

from __future__ import annotations

import numpy as np
import pytest

from bounce_case import PAIRS, BounceCase
from kv_storage import GUARD
from kvtransfer.bounce.copying import HostCopier
from kvtransfer.transceiver.layered_write import layer_slices
from kvtransfer.transceiver.parts import Part, equal_parts, layered_parts


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 7])
@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("name", PAIRS)
def test_parts_tile_the_packed_range(name: str, most: int, chunk_bytes: int):
    packed = BounceCase(name).source
    parts = layered_parts(packed, chunk_bytes, most)
    assert [one.layers for one in parts] == sorted(one.layers for one in parts)
    assert max(one.end - one.begin for one in parts) <= chunk_bytes
    ordered = sorted(parts, key=lambda one: one.begin)
    assert [one.begin for one in ordered] == [0, *(one.end for one in ordered[:-1])]
    assert ordered[-1].end == packed.nbytes


@pytest.mark.parametrize("name", PAIRS)
def test_a_part_carries_what_a_direct_write_of_its_layers_writes(name: str):
    case = BounceCase(name)
    copier, expected = HostCopier(), case.dst.memory.copy()
    for end, slice_plan in layer_slices(case.plan):
        pairs = slice_plan.instantiate(*({0: one} for one in (case.lists[0][0], case.lists[1][0])), case.tokens)
        begins = (pairs.src - case.src.base + GUARD).tolist(), (pairs.dst - case.dst.base + GUARD).tolist()
        for src, dst, length in zip(*begins, pairs.lengths.tolist(), strict=True):
            expected[dst : dst + length] = case.src.memory[src : src + length]
        for part in (one for one in layered_parts(case.source, 1 << 20) if one.layers == end):
            chunk = np.zeros(part.end - part.begin, np.uint8)
            at = int(chunk.ctypes.data)
            copier.gather(case.source, part.begin, part.end, at)
            copier.scatter(case.target, part.begin, part.end, at)
        np.testing.assert_array_equal(case.dst.memory, expected)


def test_equal_parts_end_with_the_rest():
    assert equal_parts(10, 4) == [Part(0, 4), Part(4, 8), Part(8, 10)]
    assert equal_parts(4, 4) == [Part(0, 4)]
