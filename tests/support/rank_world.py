"""The rank role of a writer with its peer, over loopback agents."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kv_storage import Shape, Storage, instance
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.ports import (
    LoadPeer,
    PeerLoaded,
    RankBlocks,
    RankReady,
    RankToHub,
    RequestKey,
    TokenRange,
    TransferNotice,
    WriteOrder,
)
from kvtransfer.rank_info import InstanceInfo, Topology
from kvtransfer.transceiver.rank import RankTransceiver

KEY = RequestKey(1 << 40)
OTHER = RequestKey((1 << 40) + 1)
I32 = np.int32
Ids = tuple[int, ...]


class World:
    """A context rank and a generation rank over loopback agents; time advances by one at every look."""

    def __init__(self) -> None:
        self.fabric, self.time = LoopbackFabric(), 0.0
        self.src, self.dst = Storage(Shape(), "slot_major", 8), Storage(Shape(), "layer_major", 8)
        self.agent, self.peer_agent = LoopbackAgent("c", self.fabric), LoopbackAgent("g", self.fabric)
        self.events: list[RankToHub] = []
        self.rank = RankTransceiver(
            self.src.page_table(), 0, Topology(), self.agent, self.events.append, clock=self._clock
        )
        self.rank.start()
        (ready,) = self.take()
        assert isinstance(ready, RankReady)
        assert ready.info == self.rank.info
        remote = RankTransceiver(self.dst.page_table(), 0, Topology(), self.peer_agent, list[RankToHub]().append)
        remote.start()
        self.peer = instance(remote.info)
        self.src.fill(np.arange(8, dtype=I32), seed=1)

    def _clock(self) -> float:
        self.time += 1.0
        return self.time

    def take(self) -> list[RankToHub]:
        events, self.events[:] = list(self.events), []
        return events

    def load(self, peer: InstanceInfo | None = None) -> PeerLoaded:
        self.rank.handle(LoadPeer(peer or self.peer))
        (loaded,) = self.take()
        assert isinstance(loaded, PeerLoaded)
        return loaded

    def order(
        self, key: RequestKey = KEY, src: Ids = (1, 2), dst: Ids = (5, 0), ranks: Ids = (0,), **changes: Any
    ) -> WriteOrder:
        order = WriteOrder(
            key,
            self.peer.instance_id,
            self.peer.incarnation,
            TokenRange(0, 7),
            (RankBlocks(0, 0, np.array(src, I32)),),
            tuple(RankBlocks(rank, 0, np.array(dst, I32)) for rank in ranks),
        )
        return dataclasses.replace(order, **changes)

    def notices(self, polls: int = 5) -> list[TransferNotice]:
        for _ in range(polls):
            self.rank.poll()
        events = self.take()
        assert all(isinstance(event, TransferNotice) for event in events)
        return [event for event in events if isinstance(event, TransferNotice)]

    def notice(self) -> TransferNotice:
        (notice,) = self.notices()
        assert self.rank.open_writes == 0
        return notice
