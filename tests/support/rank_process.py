"""Ranks in processes of their own over real NIXL, as their hub sees them. See nixl_rank.py."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from isthmus_core.framing import FrameSocket
from kv_storage import Shape, instance
from kvtransfer import wire
from kvtransfer.ports import (
    HubToRank,
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
from kvtransfer.rank_info import InstanceInfo

needs_nixl = pytest.mark.skipif(not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed")
SUPPORT = Path(__file__).parent
KEY = RequestKey(1 << 40)


class Rank:
    """A rank process, started by `prefix`, and the hub's ends of its sockets."""

    def __init__(
        self, layout: str, blocks: int, unit: int = 4, *, prefix: tuple[str, ...] = (), **environment: str
    ) -> None:
        ours, theirs = socket.socketpair()
        private, their_private = socket.socketpair()
        self.storage_args = (Shape(unit=unit), layout, blocks)
        command = [
            *prefix,
            sys.executable,
            str(SUPPORT / "nixl_rank.py"),
            str(theirs.fileno()),
            layout,
            str(blocks),
            str(unit),
        ]
        with theirs, their_private:
            self.process = subprocess.Popen(
                [*command, str(their_private.fileno())],
                pass_fds=(theirs.fileno(), their_private.fileno()),
                env={**os.environ, "UCX_MODULES": "^ib", "OMP_NUM_THREADS": "1", **environment},
                stderr=subprocess.PIPE,
            )
        self._ours = ours
        self.hub, self.private = FrameSocket(ours), FrameSocket(private)
        self.pending: list[RankToHub] = []

    def send(self, *commands: HubToRank) -> None:
        self.hub.send(wire.rank_input_to_bytes(commands))

    def recv(self) -> RankToHub | None:
        while not self.pending:
            frame = self.hub.recv()
            if frame is None:
                return None
            self.pending.extend(wire.rank_output_from_bytes(frame))
        return self.pending.pop(0)

    def info(self) -> InstanceInfo:
        ready = self.recv()
        assert isinstance(ready, RankReady), self.process.communicate()
        return instance(ready.info)

    def silent(self, wait_s: float) -> bool:
        """True when nothing is said for `wait_s` seconds."""
        return not self.pending and not select.select([self._ours], [], [], wait_s)[0]

    def ask(self, command: str) -> bytes:
        self.private.send(command.encode())
        answer = self.private.recv()
        assert answer is not None
        return answer

    def close(self) -> int:
        self.hub.close()
        self.private.close()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stderr:
                self.process.stderr.close()


def order(peer: InstanceInfo, src: Sequence[int], dst: Sequence[int], key: RequestKey = KEY) -> WriteOrder:
    return WriteOrder(
        key,
        peer.instance_id,
        peer.incarnation,
        TokenRange(0, 4 * len(dst)),
        (RankBlocks(0, 0, np.array(src, np.int32)),),
        (RankBlocks(0, 0, np.array(dst, np.int32)),),
    )


def load(writer: Rank, peer: InstanceInfo) -> PeerLoaded:
    writer.send(LoadPeer(peer))
    loaded = writer.recv()
    assert isinstance(loaded, PeerLoaded)
    return loaded


def notice_of(rank: Rank) -> TransferNotice:
    notice = rank.recv()
    assert isinstance(notice, TransferNotice)
    return notice
