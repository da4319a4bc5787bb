"""A rank in a process of its own, over the real NIXL agent: run as a script by the integration tests.

    python nixl_rank.py SOCKET_FD LAYOUT BLOCKS UNIT PRIVATE_FD

Serves the rank socket like an engine process does. On PRIVATE_FD it answers `dump` with its memory, `digest` with a
digest of it, `paint` after filling it with a pattern, and `fill N` (N blocks of position-coded bytes) with its memory
after that, so that a test can compare.
"""

from __future__ import annotations

import socket
import sys

import numpy as np
import xxhash

from isthmus_core.framing import FrameSocket
from isthmus_core.process import leave
from kv_storage import Shape, Storage
from kvtransfer.agents import make_agent
from kvtransfer.rank_info import Topology
from kvtransfer.transceiver.agent_thread import AgentThread


def main() -> int:
    """Exit code: 0 after the hub left, 4 when the agent failed."""
    rank_fd, layout, blocks, unit, private_fd = sys.argv[1:6]
    storage = Storage(Shape(unit=int(unit)), layout, int(blocks))
    thread = AgentThread(
        socket.socket(fileno=int(rank_fd)), lambda: make_agent("nixl", "test"), storage.page_table(), 0, Topology()
    )
    thread.start(60)
    private = FrameSocket.from_fd(int(private_fd))
    while (frame := private.recv()) is not None:
        command, *arguments = frame.decode().split()
        if command == "dump":
            private.send(storage.memory.tobytes())
        elif command == "digest":
            private.send(xxhash.xxh3_128_digest(storage.memory.data))
        elif command == "paint":
            storage.memory[:] = np.arange(len(storage.memory), dtype=np.uint32) % 251
            private.send(b"painted")
        elif command == "fill":
            storage.fill(np.arange(int(arguments[0]), dtype=np.int32), seed=5)
            private.send(storage.memory.tobytes())
    thread.join(20)
    return 4 if thread.failure else 0


if __name__ == "__main__":
    leave(main())
