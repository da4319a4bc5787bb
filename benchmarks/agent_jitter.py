"""Does a large post disturb the executor? Step times of the main thread while the agent's thread writes over NIXL.

    python benchmarks/agent_jitter.py [--quick] [--json FILE]

Two processes on one host: over CMA the whole copy happens inside the post. Quiet and busy stretches alternate; the
jitter of a step is its time beyond the median step of the quiet stretches of the same run.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np
from isthmus.v1 import kv_pb2
from report import Row, argument_parser, below, figure, show

from isthmus_core.framing import FrameSocket
from isthmus_core.process import leave
from kvtransfer import wire
from kvtransfer.agents import make_agent
from kvtransfer.page_table import HeadInterval, MapperKind, PageTable
from kvtransfer.ports import LoadPeer, RankBlocks, RequestKey, TokenRange, WriteOrder
from kvtransfer.rank_info import InstanceInfo, InstanceRole, ModelFingerprint, RankInfo, Topology
from kvtransfer.storage import describe_attention_pool
from kvtransfer.transceiver.agent_thread import AgentThread

BLOCK_BYTES, TOKENS = 1 << 20, 64
MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "F32")
# A large model's step is longer; a short one shows every interruption.
STEP_ROWS = 96


def memory(blocks: int) -> tuple[np.ndarray, PageTable]:
    """Touched memory of `blocks` MiB and its description."""
    arena = np.ones(blocks * BLOCK_BYTES, np.uint8)
    table = describe_attention_pool(
        base_address=int(arena.ctypes.data),
        num_blocks=blocks,
        block_bytes=BLOCK_BYTES,
        layers=(0,),
        kv_heads=HeadInterval(0, 8),
        tokens_per_block=TOKENS,
        kind=MapperKind.HND,
    )
    return arena, table


def instance(info: RankInfo) -> InstanceInfo:
    """The reader as the writer knows it."""
    return InstanceInfo("reader", os.urandom(16), "127.0.0.1:1", InstanceRole.GENERATION, MODEL, (info,))


def read(blocks: int, pipe: Connection) -> None:
    """The other process: registers memory and waits."""
    arena, table = memory(blocks)
    agent = make_agent("nixl", "reader")
    agent.register(table.regions)
    pipe.send_bytes(wire.rank_info_to_pb(RankInfo(0, Topology(), table, agent.descriptor())).SerializeToString())
    pipe.recv_bytes()
    leave(0 if arena.any() else 1)


class Writer:
    """The rank role of this process and its hub's end of the socket."""

    def __init__(self, blocks: int, peer: InstanceInfo) -> None:
        ours, theirs = socket.socketpair()
        self._frames, self._peer, self._number = FrameSocket(ours), peer, 0
        self._ours = ours
        self._arena, table = memory(blocks)
        self._blocks = blocks
        self._thread = AgentThread(theirs, lambda: make_agent("nixl", "writer"), table, 0, Topology())
        self._thread.start()
        self._frames.recv()
        self._frames.send(wire.rank_input_to_bytes([LoadPeer(peer)]))
        self._frames.recv()

    def post(self) -> None:
        """Orders a write of everything."""
        self._number += 1
        ids = (RankBlocks(0, 0, np.arange(self._blocks, dtype=np.int32)),)
        key, tokens = RequestKey((1 << 40) + self._number), TokenRange(0, TOKENS * self._blocks)
        order = WriteOrder(key, self._peer.instance_id, self._peer.incarnation, tokens, ids, ids)
        self._frames.send(wire.rank_input_to_bytes([order]))

    def over(self) -> bool:
        """True once per write, when its notice has come."""
        self._ours.setblocking(False)
        try:
            waits = bool(self._ours.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            waits = False
        self._ours.setblocking(True)
        if waits:
            self._frames.recv()
        return waits


def steps(until: float | None, writer: Writer) -> list[float]:
    """Seconds of every step: until a moment, or until the write that is open is over."""
    left, right, taken = np.ones((STEP_ROWS, STEP_ROWS)), np.ones((STEP_ROWS, STEP_ROWS)), list[float]()
    while True:
        began = time.perf_counter()
        for _ in range(4):
            np.matmul(left, right)
        taken.append(time.perf_counter() - began)
        if writer.over() if until is None else time.perf_counter() > until:
            return taken


def measure(mib: int, rounds: int) -> list[Row]:
    """Alternates quiet and busy stretches."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=read, args=(mib, theirs))
    process.start()
    info = kv_pb2.RankInfo.FromString(pipe.recv_bytes())
    writer = Writer(mib, instance(wire.rank_info_from_pb(info)))
    quiet, busy, wall = list[float](), list[float](), list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        writer.post()
        busy += steps(None, writer)
        wall.append(time.perf_counter() - began)
        quiet += steps(time.perf_counter() + wall[-1], writer)
    pipe.send_bytes(b"done")
    process.join(20)
    base = statistics.median(quiet)
    p99 = {name: (np.percentile(values, 99) - base) * 1e3 for name, values in (("quiet", quiet), ("busy", busy))}
    return [
        figure(f"write of {mib} MiB", mib / 1024 / statistics.median(wall), "GiB/s"),
        figure("steps while a write was in flight", len(busy), "steps"),
        figure("median step, quiet", base * 1e3, "ms"),
        figure("median step, write in flight", statistics.median(busy) * 1e3, "ms"),
        figure("step jitter p99, quiet", float(p99["quiet"]), "ms"),
        below("step jitter p99, write in flight", float(p99["busy"]), "ms", 1.0),
    ]


def main() -> int:
    """Command line."""
    os.environ.setdefault("UCX_MODULES", "^ib")
    arguments = argument_parser(__doc__).parse_args()
    show("executor beside a large post", measure(256, 4 if arguments.quick else 20), arguments.json)
    return 0


if __name__ == "__main__":
    leave(main())
