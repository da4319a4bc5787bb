"""How long bytes of a write still land after its writer was SIGKILLed and reaped: the reason for `transfer.drain_s`.

    python benchmarks/drain_time.py [--quick] [--json FILE] [--trials 20] [--path cuda]

A writer process posts large writes into this process without a pause; it is killed at a random moment. From the moment
its exit is known, samples of the memory are compared until they have not changed for --watch seconds. `cuda`: from the
first GPU to the last one, or within the only one; measured too where there is a GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
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
from kvtransfer.page_table import MemoryKind, RegisteredRegion

# UCX_TLS of each path.
PATHS = {"cma": "", "tcp": "tcp", "cuda": ""}
SAMPLE = 4096


class Memory:
    """Bytes on the host, or on a CUDA device."""

    def __init__(self, nbytes: int, device: int | None) -> None:
        if device is None:
            self.bytes: Any = np.zeros(nbytes, np.uint8)
            self.region = RegisteredRegion(int(self.bytes.ctypes.data), nbytes, MemoryKind.DRAM)
            return
        import torch

        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        self.region = RegisteredRegion(self.bytes.data_ptr(), nbytes, MemoryKind.VRAM, device)

    def samples(self) -> np.ndarray:
        """One byte of every page, as it is now."""
        if self.region.memory_kind is MemoryKind.DRAM:
            return self.bytes[::SAMPLE].copy()
        return self.bytes[::SAMPLE].cpu().numpy()


def devices(path: str) -> tuple[int | None, int | None]:
    """Of the writer and of what it writes to."""
    if path != "cuda":
        return None, None
    import torch

    return 0, torch.cuda.device_count() - 1


def _write(pipe: Connection, size: int, device: int | None) -> None:
    """The writer: alternates two sources, so that every write changes every byte."""
    from kvtransfer.agents import make_agent
    from kvtransfer.agents.base import WriteState
    from kvtransfer.regions import RegionPairs

    sources = Memory(2 * size, device)
    sources.bytes[:size], sources.bytes[size:] = 1, 2
    agent = make_agent("nixl", "drain-writer")
    agent.register([sources.region])
    remote, region = pipe.recv()
    agent.load_remote(remote, [region])
    pipe.send(agent.path(remote.name))
    row, step = np.arange(0, size, 1 << 20, dtype=np.int64), 1 << 20
    base, turn = region.base_address, 0
    while True:
        src = sources.region.base_address + turn % 2 * size + row
        handle = agent.submit(RegionPairs(src, base + row, np.full(len(row), step, np.int64)), remote.name)
        while agent.poll(handle).state is WriteState.IN_FLIGHT:
            time.sleep(0)
        agent.release(handle)
        if turn == 1:
            pipe.send("busy")
        turn += 1


def _trial(agent: Any, memory: Memory, writes_from: int | None, watch_s: float) -> tuple[str, float, float]:
    """Path, seconds from the kill to the exit report, seconds from that to the last change."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, memory.region.size_bytes, writes_from)
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=arguments, daemon=True)
    writer.start()
    theirs.close()
    ours.send((agent.descriptor(), memory.region))
    path = ours.recv()
    ours.recv()
    time.sleep(random.uniform(0.05, 0.4))
    _check_that_bytes_land(memory)
    killed = time.monotonic()
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    known = last = time.monotonic()
    # Bytes that land between the kill and the exit report are covered by waiting for the report.
    exit_s = known - killed
    before = memory.samples()
    while (now := time.monotonic()) < last + watch_s:
        after = memory.samples()
        if not np.array_equal(before, after):
            last, before = now, after
    return path, exit_s, last - known


def _check_that_bytes_land(memory: Memory) -> None:
    before = memory.samples()
    for _ in range(20):
        # A whole number of writes may have passed: then the samples are the same.
        time.sleep(0.1 * random.random())
        if not np.array_equal(before, memory.samples()):
            return
    raise SystemExit("no bytes land while the writer is alive: the samples prove nothing")


def _measure(name: str, trials: int, size: int, watch_s: float) -> dict[str, object]:
    from kvtransfer.agents import make_agent

    source, target = devices(name)
    memory = Memory(size, target)
    agent = make_agent("nixl", "drain-reader")
    agent.register([memory.region])
    runs = [_trial(agent, memory, source, watch_s) for _ in range(trials)]
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


def _sees_a_gpu() -> bool:
    # Not by torch in this process: it would start CUDA, and every writer is a process of its own.
    return shutil.which("nvidia-smi") is not None


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
        if name == "cuda" and not _sees_a_gpu():
            continue
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
