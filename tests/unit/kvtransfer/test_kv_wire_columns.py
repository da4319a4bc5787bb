"""Columns whose values are mostly the same survive the wire like any others, notice by notice and list by list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.v1 import transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import Extent, RankBlocks, RequestKey, TokenRange, TransferNotice, TransferStats, WriterOutcome
from kvtransfer.wire._columns import columns_from_bytes, joined_columns
from kvtransfer.wire.block_lists import block_lists_from_pb, block_lists_to_pb
from kvtransfer.wire.notices import notices_from_pb, notices_to_pb

FIRST = 1 << 40
few = st.integers(0, 2)
extents = st.lists(
    st.sampled_from([Extent(0, 0, TokenRange(0, 9), 0, 4), Extent(1, 0, TokenRange(3, 9), 2, 5)]), max_size=2
)
seconds = st.sampled_from([0.0, 0.5, 1.5])


@st.composite
def notice(draw: st.DrawFn) -> TransferNotice:
    """Of few different values, so that whole columns are often the same."""
    path, reason, why = (draw(st.sampled_from(["", "a", "b"])) for _ in range(3))
    stats = TransferStats(draw(few), 1, path, draw(seconds), 0.0, draw(seconds), 0.25, draw(few), 0.0)
    # Only chunks wait for room.
    stats = stats._replace(credit=draw(seconds) if stats.bounced else 0.0, why=why)
    outcome = draw(st.sampled_from([WriterOutcome.DELIVERED, WriterOutcome.NEVER_STARTED]))
    held = draw(st.booleans()) and outcome is WriterOutcome.NEVER_STARTED
    key = RequestKey(FIRST + draw(few), draw(few))
    given_extents = tuple(draw(extents))
    return TransferNotice(key, draw(few), draw(few), outcome, given_extents, reason, stats, held, draw(few), draw(few))


@given(st.lists(notice(), max_size=5))
@settings(max_examples=150, deadline=None)
def test_notices(notices: list[TransferNotice]):
    sent = notices_to_pb(notices).SerializeToString()
    assert notices_from_pb(transfer_pb2.TransferNotices.FromString(sent)) == tuple(notices)


@given(st.lists(st.tuples(st.integers(0, 4), few, st.lists(st.integers(-1, 9), max_size=3)), max_size=5))
@settings(max_examples=100, deadline=None)
def test_block_lists(drawn: list[tuple[int, int, list[int]]]):
    named = {(rank, group): ids for rank, group, ids in drawn}
    lists = [RankBlocks(*place, np.array(ids, np.int32), len(ids)) for place, ids in named.items()]
    read = block_lists_from_pb(block_lists_to_pb(lists), "lists")
    assert [(one.rank, one.layer_group, one.blocks.tolist(), one.begin) for one in read] == [
        (one.rank, one.layer_group, one.blocks.tolist(), one.begin) for one in lists
    ]


@pytest.mark.parametrize("code", ["I", "Q", "d"])
@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_column_that_is_the_same_and_one_that_is_not(code: str, rows: int):
    columns = [(7,) * rows, tuple(range(rows))]
    data = joined_columns(code, columns)
    assert [tuple(one) for one in columns_from_bytes(code, data, rows, 2, "field")] == columns


def test_a_value_that_does_not_fit_is_named_in_either_kind_of_column():
    for column in ((1 << 32,) * 3, (1, 2, 1 << 32)):
        with pytest.raises(ValueError, match="does not fit"):
            joined_columns("I", [column])
    with pytest.raises(WireError, match="3 rows"):
        columns_from_bytes("I", joined_columns("I", [(1, 1, 1)]), 3, 2, "field")
