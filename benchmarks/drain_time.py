"""How long bytes of a write still land after its writer was SIGKILLed and reaped: the reason for `transfer.drain_s`.

    python benchmarks/drain_time.py [--quick] [--json FILE] [--trials 20]

A writer process posts large writes into this process without a pause; it is killed at a random moment. From the moment
its exit is known, samples of the memory are compared until they have not changed for --watch seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from report import Row, argument_parser, below, figure, show

from isthmus_core.config import TransferConfig

PATHS = {"cma": "", "tcp": "tcp"}
SAMPLE = 4096


def _write(pipe: Connection, size: int) -> None:
    """The writer: alternates two sources, so that every write changes every byte."""
    from kvtransfer.agents import make_agent
    from kvtransfer.agents.base import WriteState
    from kvtransfer.page_table import MemoryKind, RegisteredRegion
    from kvtransfer.regions import RegionPairs

    sources = np.empty((2, size), np.uint8)
    sources[0], sources[1] = 1, 2
    agent = make_agent("nixl", "drain-writer")
    agent.register([RegisteredRegion(int(sources.ctypes.data), 2 * size, MemoryKind.DRAM)])
    remote, base = pipe.recv()
    agent.load_remote(remote, [RegisteredRegion(base, size, MemoryKind.DRAM)])
    pipe.send(agent.path(remote.name))
    row, step = np.arange(0, size, 1 << 20, dtype=np.int64), 1 << 20
    turn = 0
    while True:
        src = int(sources[turn % 2].ctypes.data) + row
        handle = agent.submit(RegionPairs(src, base + row, np.full(len(row), step, np.int64)), remote.name)
        while agent.poll(handle).state is WriteState.IN_FLIGHT:
            time.sleep(0)
        agent.release(handle)
        if turn == 1:
            pipe.send("busy")
        turn += 1


def _trial(agent: Any, memory: np.ndarray, watch_s: float) -> tuple[str, float, float]:
    """Path, seconds from the kill to the exit report, seconds from that to the last change."""
    ours, theirs = multiprocessing.Pipe()
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(theirs, memory.nbytes), daemon=True)
    writer.start()
    theirs.close()
    ours.send((agent.descriptor(), int(memory.ctypes.data)))
    path = ours.recv()
    ours.recv()
    time.sleep(random.uniform(0.05, 0.4))
    before = memory[::SAMPLE].copy()
    time.sleep(0.1)
    if np.array_equal(before, memory[::SAMPLE]):
        raise SystemExit("no bytes land while the writer is alive: the samples prove nothing")
    killed = time.monotonic()
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    known = last = time.monotonic()
    # Bytes that land between the kill and the exit report are covered by waiting for the report.
    exit_s = known - killed
    before = memory[::SAMPLE].copy()
    while (now := time.monotonic()) < last + watch_s:
        after = memory[::SAMPLE].copy()
        if not np.array_equal(before, after):
            last, before = now, after
    return path, exit_s, last - known


def _measure(name: str, trials: int, size: int, watch_s: float) -> dict[str, object]:
    from kvtransfer.agents import make_agent
    from kvtransfer.page_table import MemoryKind, RegisteredRegion

    memory = np.zeros(size, np.uint8)
    agent = make_agent("nixl", "drain-reader")
    agent.register([RegisteredRegion(int(memory.ctypes.data), size, MemoryKind.DRAM)])
    runs = [_trial(agent, memory, watch_s) for _ in range(trials)]
    late = sorted(seconds for *_, seconds in runs)
    return {
        "name": name,
        "path": runs[0][0],
        "trials": trials,
        "write_MiB": size >> 20,
        "exit_known_after_ms": round(statistics.median(exit_s for _, exit_s, _ in runs) * 1e3, 2),
        "landed_late": sum(seconds > 0 for seconds in late),
        "median_ms": round(statistics.median(late) * 1e3, 2),
        "max_ms": round(late[-1] * 1e3, 2),
    }


def rows(found: dict[str, Any]) -> list[Row]:
    """The figures of one path. The aim: `transfer.drain_s` covers what landed late."""
    name = f"{found['path']}, {found['trials']} kills"
    return [
        figure(f"{name}: exit known after, median", found["exit_known_after_ms"], "ms"),
        figure(f"{name}: trials with bytes after that", found["landed_late"], "trials"),
        below(f"{name}: last byte after that, worst", found["max_ms"], "ms", TransferConfig().drain_s * 1e3),
    ]


def main() -> int:
    """Each path runs in a process of its own, since UCX reads its settings once."""
    parser = argument_parser(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--mib", type=int, default=256, help="size of one write")
    parser.add_argument("--watch", type=float, default=1.0, help="seconds without a change that end a trial")
    parser.add_argument("--path", choices=sorted(PATHS), help="only this one, in this process: prints a line of JSON")
    given = parser.parse_args()
    if given.path:
        print(json.dumps(_measure(given.path, given.trials, given.mib << 20, given.watch)), flush=True)
        sys.stdout.flush()
        # NIXL may crash while the interpreter tears it down; everything has been said.
        os._exit(0)
    trials = min(given.trials, 5) if given.quick else given.trials
    made: list[Row] = []
    for name, transports in PATHS.items():
        environment = {**os.environ, "UCX_LOG_LEVEL": "fatal"}
        if transports:
            environment["UCX_TLS"] = transports
        command = [sys.executable, __file__, "--path", name, "--trials", str(trials)]
        command += ["--mib", str(given.mib), "--watch", str(given.watch)]
        done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        made += rows(json.loads(done.stdout.splitlines()[-1]))
    show("bytes after the death of their writer", made, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
