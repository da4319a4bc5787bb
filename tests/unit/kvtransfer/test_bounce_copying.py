"""A chunk gathered, cut anywhere and scattered moves exactly what a direct write of the runs moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bounce_case import PAIRS, BounceCase
from kvtransfer.bounce.copying import HostCopier, copy_rows
from kvtransfer.transfer import StridedRuns


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("parts", [1, 2, 7, 50])
def test_parts_of_a_packed_range_move_what_a_direct_write_moves(name: str, parts: int):
    case = BounceCase(name, parts)
    expected = case.expected()
    assert case.bounce(HostCopier(), parts) == expected
    assert case.source.nbytes == case.target.nbytes


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_rows_of_any_size_and_place(unit: int, count: int, gap: int, number: int, random: object):
    """Against a copy byte by byte; sizes and addresses need not be aligned."""
    rng = np.random.default_rng(random.randrange(1 << 30))  # pyright: ignore[reportAttributeAccessIssue]
    room = count * (unit + gap)
    memory = rng.integers(0, 256, (2, number * room + 8), np.uint8)
    at = [rng.permutation(number) * room + 3, rng.permutation(number) * room + 1]
    expected = memory[1].copy()
    for a, b in zip(*at, strict=True):
        for turn in range(count):
            where = turn * (unit + gap)
            expected[b + where : b + where + unit] = memory[0][a + where : a + where + unit]
    one = np.ones(number, np.int64)
    ends = [place + int(side.ctypes.data) for place, side in zip(at, memory, strict=True)]
    rows = StridedRuns(*ends, one * unit, one * count, one * (unit + gap), one * (unit + gap))
    copy_rows(rows.src, rows.dst, rows)
    assert memory[1].tobytes() == expected.tobytes()
