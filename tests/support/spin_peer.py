"""A rank over NIXL with its cache on the GPU, here and in a child process: the other end of writes that must wait."""

# torch is typed in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from device_storage import DeviceStorage
from kv_storage import Shape
from kvtransfer.agents import make_agent
from kvtransfer.agents.base import WriteState
from kvtransfer.rank_info import Topology
from kvtransfer.regions import RegionPairs
from kvtransfer.transceiver.rank import RankTransceiver

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvtransfer.agents.base import Agent
    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.transceiver.layer_progress import LayerProgress

BLOCKS, BLOCK = 64, 16
SHAPE = Shape(layers=(0, 1, 2, 3), heads=4, unit=64, tokens_per_block=BLOCK)
# What the child writes over whatever it is told to.
MARK = 0x5A


class Side:
    """The rank, and what it has said."""

    def __init__(self, name: str, layout: str, layers: LayerProgress | None = None) -> None:
        self.storage = DeviceStorage(SHAPE, layout, BLOCKS)
        self.agent, self.events = make_agent("nixl", name), list[Any]()
        self.rank = RankTransceiver(
            self.storage.page_table(), 0, Topology(), self.agent, self.events.append, layers=layers
        )
        self.rank.start()
        self.events.clear()


class Peer:
    """The child: `info` is its rank's."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self.info = pipe, pipe.recv()

    def read(self) -> bytes:
        """What its memory holds now."""
        self._pipe.send(None)
        return self._pipe.recv()

    def mark(self, agent: Agent, region: RegisteredRegion) -> str:
        """It writes MARK over all of that memory of ours, now. Returns the state in which the write ended."""
        self._pipe.send((agent.descriptor(), region))
        return self._pipe.recv()


@contextmanager
def peer() -> Generator[Peer]:
    """A child that ends with the block."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_main, args=(theirs,), daemon=True)
    child.start()
    theirs.close()
    try:
        yield Peer(ours)
    finally:
        child.kill()
        child.join()


def _main(pipe: Connection) -> None:
    side, known = Side("peer", "layer_major"), set[str]()
    side.storage.upload()
    pipe.send(side.rank.info)
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            os._exit(0)
        if order is None:
            pipe.send(side.storage.download())
            continue
        remote, region = order
        if remote.name not in known:
            known.add(remote.name)
            side.agent.load_remote(remote, [region])
            side.storage.twin.fill_(MARK)
            torch.cuda.synchronize()
        ends = (np.array([side.storage.base]), np.array([region.base_address]), np.array([region.size_bytes]))
        handle = side.agent.submit(RegionPairs(*ends), remote.name)
        while (status := side.agent.poll(handle)).state is WriteState.IN_FLIGHT:
            time.sleep(0)
        side.agent.release(handle)
        pipe.send(status.state.name)
