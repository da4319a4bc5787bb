# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Raw bytes over TCP beside Mooncake's transfer engine: its write, a bare NIXL write, and a whole hand-off of ours.

    python benchmarks/transfer_mooncake.py [--quick] [--json FILE]

All three between two processes of this machine, over TCP only, contiguous memory of the host, bytes verified. Needs
`pip install mooncake-transfer-engine-non-cuda` (and libibverbs1, librdmacm1, libnuma1, libcurl4), which nothing else
here uses.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import numpy as np

# Before NIXL is loaded, in both processes: the same transport for everybody.
os.environ["UCX_TLS"] = "tcp,self"

from report import Row, argument_parser, at_least, figure, interleaved, show
from transfer_cases import CASES
from transfer_half import Setting, pattern
from transfer_pair import Pair

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def _engine() -> tuple[Any, str]:
    """An engine, and where its peers find it."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake's engine does not start")
    return engine, f"127.0.0.1:{engine.get_rpc_port()}"


def _register(engine: Any, nbytes: int) -> Any:
    memory = np.zeros(nbytes, np.uint8)
    if engine.register_memory(memory.ctypes.data, nbytes) != 0:
        raise RuntimeError(f"Mooncake registers no {nbytes} bytes")
    return memory


def target_main(pipe: Connection, nbytes: int) -> None:
    """Memory to write into; every message is answered with whether it holds the pattern, and clears it."""
    engine, name = _engine()
    memory, expected = _register(engine, nbytes), pattern(nbytes, 1)
    pipe.send((name, memory.ctypes.data))
    while pipe.recv():
        pipe.send(bool(np.array_equal(memory, expected)))
        memory[:] = 0
    os._exit(0)


def source_main(pipe: Connection, nbytes: int) -> None:
    """Writes when told where; answers with the seconds it took."""
    engine, _ = _engine()
    memory = _register(engine, nbytes)
    memory[:] = pattern(nbytes, 1)
    pipe.send(True)
    while where := pipe.recv():
        began = time.perf_counter()
        code = engine.transfer_sync_write(where[0], memory.ctypes.data, where[1], nbytes)
        pipe.send(time.perf_counter() - began if code == 0 else -1.0)
    os._exit(0)


class Mooncake:
    """Two processes with an engine each. `write` takes seconds."""

    def __init__(self, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for main in (target_main, source_main):
            ours, theirs = Pipe()
            context.Process(target=main, args=(theirs, nbytes), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        self._where = self._pipes[0].recv()
        self._pipes[1].recv()

    def write(self) -> float:
        """One write, verified. Raises RuntimeError when it fails or other bytes have come."""
        target, source = self._pipes
        source.send(self._where)
        took = source.recv()
        target.send(True)
        if took < 0 or not target.recv():
            raise RuntimeError("Mooncake's write failed, or other bytes have come")
        return took

    def close(self) -> None:
        """End both."""
        for pipe in self._pipes:
            pipe.send(None)


def measure(nbytes: int, rounds: int) -> list[Row]:
    """Rows of one size."""
    (case,) = [one for one in CASES if one.name == "contiguous"]
    pair = Pair(case, nbytes, (None, None), 2 * nbytes)
    peer = Mooncake(pair.nbytes)
    try:
        ways: dict[str, Callable[[], float]] = {
            "mooncake": peer.write,
            "nixl": pair.raw,
            "ours": lambda: pair.run(Setting("cost"))[0],
        }
        for run in ways.values():
            run()
        seconds = interleaved(ways, rounds)
    finally:
        peer.close()
        pair.close()
    rate = {name: pair.nbytes / took / 1e9 for name, took in seconds.items()}
    size = f"{pair.nbytes // MIB} MiB over TCP"
    return [
        figure(f"{size}: one NIXL write", rate["nixl"], "GB/s"),
        at_least(f"{size}: a hand-off / Mooncake's write", rate["ours"], "GB/s", rate["mooncake"], 1.0),
    ]


def main() -> int:
    """The command."""
    options = argument_parser(__doc__).parse_args()
    if find_spec("mooncake") is None:
        print("mooncake is not installed: pip install mooncake-transfer-engine-non-cuda", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for mib in (1, 16) if options.quick else (1, 16, 64, 256):
        rows += measure(mib * MIB, 5 if options.quick else 9)
    show("raw bytes beside Mooncake", rows, options.json)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # NIXL's libraries do not leave in good order.
    os._exit(code)
