# pyright: reportPrivateUsage=false
"""What posting costs: 1, 2, 4 agents on as many threads, descriptors made at once or picked from prepared lists.

    fragments in no order ── T threads, one agent each ─▶ NIXL writes ─▶ memory of another process

Beside them one write of the same bytes in one piece: what a chunk costs on the wire. Bytes are verified.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import numpy as np
from report import Row, argument_parser, figure, interleaved, show, write
from transfer_half import Memory, pattern

from kvtransfer.agents.base import WriteState
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.regions import RegionPairs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvtransfer.pools import RegisteredRegion
    from kvtransfer.rank_info import AgentDescriptor

MIB = 1 << 20
THREADS = (1, 2, 4)


def serve(pipe: Connection, nbytes: int, device: int | None) -> None:
    """The process whose memory is written to; answers with a copy of it."""
    memory = Memory(device)
    region, array = memory.take(nbytes, None)
    agent = NixlAgent("target")
    agent.register([region])
    pipe.send((agent.descriptor(), region))
    while True:
        try:
            pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(array if device is None else array.cpu().numpy())


class Sender:
    """One agent and its share of the fragments. Used by one thread at a time."""

    def __init__(self, number: int, source: RegisteredRegion, target: tuple[AgentDescriptor, RegisteredRegion]) -> None:
        self.agent, self._far = NixlAgent(f"sender{number}"), target[0].name
        self.agent.register([source])
        self.agent.load_remote(target[0], [target[1]])
        self._source, self._target, self._lists = source, target[1], dict[int, tuple[object, object]]()

    def prepare(self, size: int) -> None:
        """Lists of every fragment of both sides, as an engine would make them once for its pools."""
        api: Any = self.agent._api
        made: list[object] = []
        for owner, region in (("", self._source), (self._far, self._target)):
            count = region.size_bytes // size
            rows = np.stack(
                (
                    region.base_address + np.arange(count) * size,
                    np.full(count, size),
                    np.full(count, region.device_id),
                ),
                axis=1,
            )
            made.append(api.prep_xfer_dlist(owner, rows.astype(np.uint64), region.memory_kind.name))
        self._lists[size] = (made[0], made[1])

    def written(self, size: int, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Descriptors made for this write, as `NixlAgent.submit` does."""
        near, far = self._source.base_address + src * size, self._target.base_address + dst * size
        handle = self.agent.submit(RegionPairs(near, far, np.full(len(src), size, np.int64)), self._far)
        while self.agent.poll(handle).state is WriteState.IN_FLIGHT:
            time.sleep(0)
        self.agent.release(handle)

    def picked(self, size: int, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Descriptors picked from the prepared lists."""
        api: Any = self.agent._api
        near, far = self._lists[size]
        handle = api.make_prepped_xfer("WRITE", near, src.astype(np.int32), far, dst.astype(np.int32))
        state = api.transfer(handle)
        while state == "PROC":
            time.sleep(0)
            state = api.check_xfer_state(handle)
        api.release_xfer_handle(handle)


class Bench:
    """The writing process."""

    def __init__(self, nbytes: int, devices: tuple[int | None, int | None]) -> None:
        self._nbytes, self._memory = nbytes, Memory(devices[0])
        self._source, _ = self._memory.take(nbytes, 1)
        self._pipe, theirs = Pipe()
        context = multiprocessing.get_context("spawn")
        context.Process(target=serve, args=(theirs, nbytes, devices[1]), daemon=True).start()
        target = self._pipe.recv()
        self._senders = [Sender(number, self._source, target) for number in range(max(THREADS))]

    def rows(self, size: int, rounds: int) -> list[Row]:
        """Fragments of `size` bytes."""
        count = self._nbytes // size
        rng = np.random.default_rng(size)
        src, dst = (rng.permutation(count).astype(np.int64) for _ in range(2))
        for sender in self._senders:
            sender.prepare(size)
        ways: dict[str, Callable[[], float]] = {
            f"{threads} threads, {name}": lambda threads=threads, name=name: self._timed(threads, name, size, src, dst)
            for threads, name in itertools.product(THREADS, ("written", "picked"))
        }
        whole = np.zeros(1, np.int64)
        ways["one piece"] = lambda: self._timed(1, "written", self._nbytes, whole, whole)
        for name, run in ways.items():
            run()
            if name != "one piece":
                self._verify(size, src, dst)
        took = interleaved(ways, rounds)
        base, label = took["1 threads, written"], f"{count} x {size} B"
        return [
            Row(f"{label}: {name}", seconds * 1e3, "ms", base * 1e3, base / seconds)
            if name != "one piece"
            else figure(f"{label}: {name}", seconds * 1e3, "ms")
            for name, seconds in took.items()
        ]

    def _timed(self, threads: int, name: str, size: int, src: NDArray[np.int64], dst: NDArray[np.int64]) -> float:
        shares = zip(self._senders, np.array_split(src, threads), np.array_split(dst, threads), strict=False)
        workers = [threading.Thread(target=getattr(one, name), args=(size, a, b)) for one, a, b in shares]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return time.perf_counter() - began

    def _verify(self, size: int, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        self._pipe.send(None)
        found = self._pipe.recv()[: len(src) * size].reshape(-1, size)
        if not np.array_equal(found[dst], pattern(self._nbytes, 1)[: len(src) * size].reshape(-1, size)[src]):
            raise RuntimeError(f"other bytes than were written, in fragments of {size} bytes")


def main() -> int:
    """Prints and writes one row for each way."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--mib", type=int, default=0, help="bytes of a write; default 16 on the host, 64 on a GPU")
    parser.add_argument("--sizes", type=int, nargs="*", default=[512, 2048, 16384], help="bytes of a fragment")
    options = parser.parse_args()
    devices = (None, None) if options.device == "host" else (0, 0)
    default = 4 if options.quick else 16 if options.device == "host" else 64
    bench, table = Bench((options.mib or default) * MIB, devices), list[Row]()
    for size in options.sizes:
        table += bench.rows(size, 3 if options.quick else 7)
        for row in table[-7:]:
            print(row, flush=True)
        if options.json is not None:
            write(table, options.json)
    if sys.stdout.isatty():
        show("posting", table)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # NIXL's UCX crashes in the C library's exit handlers.
    os._exit(code)
