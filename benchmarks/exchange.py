"""The exchange that the control plane is measured with: a KvRequest there, a TransferNotice back.

Both transports carry the same two dataclasses between the same two processes; each converts them as it must
(protobuf with every check of `kvtransfer.wire`, or msgpack maps).
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np

from isthmus_core.keys import RequestKey
from kvtransfer.messages import KvRequest
from kvtransfer.ports import Extent, RankBlocks, TokenRange, TransferNotice, TransferStats, WriterOutcome

FIRST_ID = 1 << 40
TOKENS = TokenRange(0, 4096)
# With this many block ids a KvRequest is 200 bytes, and 16 KiB.
SMALL, LARGE = 43, 4089
STATS = TransferStats(1 << 20, 64, "nixl/ucx cma", 1e-4, 2e-4, 3e-4, 4e-4)


def request(number: int, blocks: int, lists: int = 1) -> KvRequest:
    """The number-th request, with `lists` lists of `blocks` block ids each."""
    ids = np.arange(blocks, dtype=np.int32)
    destinations = tuple(RankBlocks(rank, 0, ids) for rank in range(lists))
    return KvRequest(RequestKey(FIRST_ID + number), TOKENS, destinations, receive=number)


def answer(asked: KvRequest) -> list[TransferNotice]:
    """One notice for each list of a request."""
    extents = (Extent(0, 0, asked.tokens, 0, 32),)
    return [
        TransferNotice(
            asked.key, one.rank, one.rank, WriterOutcome.DELIVERED, extents, stats=STATS, receive=asked.receive
        )
        for one in asked.destinations
    ]


class Server:
    """`serve(ready)` in a process of its own; it sends its port over `ready` and ends when that is closed."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        context = get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there,), daemon=True)
        self._process.start()
        there.close()
        self.port: int = self._here.recv()

    def close(self) -> None:
        """Ends the process."""
        self._here.close()
        self._process.join(5)
        self._process.kill()
