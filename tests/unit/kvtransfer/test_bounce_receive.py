"""The generation side of chunks: what a writer that asks for much gets, and what its rank is told early."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isthmus_core.keys import RequestKey
from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer.bounce_ports import ChunkName, ChunkReady, Grant, PrepareScatter
from kvtransfer.errors import ProtocolError
from kvtransfer.messages import KvRequest
from kvtransfer.ports import RankBlocks, TokenRange
from kvtransfer.session.actions import Action, ToPeer, ToRank
from kvtransfer.session.bounce_receive import MOST_ASKED, BounceReceive

KEY, PEER = RequestKey(1 << 40), ("c", b"c" * 16)
TOKENS = TokenRange(0, 16)


def name(seq: int) -> ChunkName:
    return ChunkName(KEY, 1, 0, 0, seq)


class World:
    """One rank with an arena of two chunks, and one open receive."""

    def __init__(self) -> None:
        cache, arena = Storage(Shape(), "slot_major", 4), Storage(Shape(), "slot_major", 2)
        self.keep = (cache, arena)
        (region,) = arena.page_table().regions
        self.unit = region.size_bytes // 2
        self.said: list[Action] = []
        local = instance(replace(rank_info(cache.page_table()), arena=region))
        self.chunks = BounceReceive(local, self.unit, 1, self.said.append)
        lists = (RankBlocks(0, 0, np.array([2, 1], np.int32)),)
        self.chunks.asked(PEER, KvRequest(KEY, TOKENS, lists, receive=1))

    def told(self, kind: type[Grant | PrepareScatter]) -> list[Grant | PrepareScatter]:
        messages = [one.message for one in self.said if isinstance(one, (ToPeer, ToRank))]
        return [one for one in messages if isinstance(one, kind)]


def test_the_rank_is_told_once_of_each_part_that_will_come():
    world = World()
    for seq, (begin, end) in enumerate(((0, 8), (0, 8), (8, 16), (0, 8)), 1):
        world.chunks.ready(PEER, ChunkReady(name(seq), 1, window=TokenRange(begin, end), layer_groups=(0,)))
    # A peer that does not say what comes, and one that says so again.
    world.chunks.ready(PEER, ChunkReady(name(9), 1))
    world.chunks.ready(PEER, ChunkReady(name(9), 1))
    prepared = [one for one in world.told(PrepareScatter) if isinstance(one, PrepareScatter)]
    assert [one.window for one in prepared] == [TokenRange(0, 8), TokenRange(8, 16)]
    assert prepared[0].tokens == TOKENS
    assert prepared[0].destinations[0].blocks.tolist() == [2, 1]


def test_a_writer_that_asks_without_end_has_broken_the_protocol():
    world = World()
    for seq in range(MOST_ASKED):
        world.chunks.ready(PEER, ChunkReady(name(seq), 1))
        # Asked again after a reconnect: nothing new.
        world.chunks.ready(PEER, ChunkReady(name(seq), 1))
    with pytest.raises(ProtocolError, match=f"more than {MOST_ASKED} chunks"):
        world.chunks.ready(PEER, ChunkReady(name(MOST_ASKED), 1))
    granted = {one.name.seq for one in world.told(Grant) if isinstance(one, Grant)}
    assert granted == {0, 1}
