"""What notices say about chunks travels beside their columns: absent, of one notice, of many, and wrong."""

from __future__ import annotations

import struct

import pytest
from isthmus.v1 import transfer_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import RequestKey, TransferNotice, TransferStats, WriterOutcome
from kvtransfer.wire.notices import notices_from_pb, notices_to_pb

STATS = TransferStats(64, 2, "cma", wire=0.5, bounced=64, credit=0.25, gather=0.125, scatter=1.5, why="96 blocks")
PLAIN = TransferStats(64, 2, "cma", wire=0.5)


def _notices(*stats: TransferStats) -> list[TransferNotice]:
    key = RequestKey((1 << 40) + 1)
    return [
        TransferNotice(key, rank, 0, WriterOutcome.DELIVERED, reason="r" * rank, stats=one)
        for rank, one in enumerate(stats)
    ]


@pytest.mark.parametrize(
    "stats", [(STATS,), (PLAIN,), (STATS, PLAIN), (PLAIN, PLAIN), (PLAIN._replace(why="a"), STATS, STATS)]
)
def test_stages_come_back_and_cost_nothing_where_there_are_none(stats: tuple[TransferStats, ...]):
    notices = _notices(*stats)
    pb = transfer_pb2.TransferNotices.FromString(notices_to_pb(notices).SerializeToString())
    assert list(notices_from_pb(pb)) == notices
    assert bool(pb.le_stages) == any(one.bounced for one in stats)
    assert bool(pb.le_whys) == any(one.why for one in stats)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e12])
@pytest.mark.parametrize("count", [1, 2])
def test_stages_that_are_no_durations_are_refused(seconds: float, count: int):
    pb = notices_to_pb(_notices(*[STATS] * count))
    pb.le_stages = struct.pack("<d", seconds) + pb.le_stages[8:]
    with pytest.raises(WireError, match="le_stages"):
        notices_from_pb(pb)


@pytest.mark.parametrize("count", [1, 2])
def test_a_reason_that_is_not_there_is_refused(count: int):
    pb = notices_to_pb(_notices(*[STATS] * count))
    pb.le_whys = struct.pack("<I", 9) + pb.le_whys[4:]
    with pytest.raises(WireError, match="number 9 is named"):
        notices_from_pb(pb)


def test_stages_of_fewer_rows_are_refused():
    pb = notices_to_pb(_notices(STATS, STATS))
    pb.le_stages = pb.le_stages[:8]
    with pytest.raises(WireError, match="le_stages"):
        notices_from_pb(pb)


def test_a_negative_stage_is_not_written():
    with pytest.raises(ValueError, match="negative"):
        notices_to_pb(_notices(STATS._replace(gather=-1.0)))
