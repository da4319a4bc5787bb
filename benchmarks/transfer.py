"""Hand-offs of caches whose layouts differ, between two processes over NIXL: one write, direct, in series, pipelined.

Every run's bytes are verified. `--device cuda` takes two GPUs; without it the caches lie in host memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_cases import CASES
from transfer_pair import Pair, Setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from report import Row
    from transfer_cases import Case

MIB = 1 << 20
# Beyond this a direct write takes longer than everything else together.
MANY = 40_000


def measure(case: Case, nbytes: int, devices: tuple[int | None, int | None], rounds: int) -> dict[str, object]:
    """Medians in seconds, interleaved, of one case and size."""
    arena = min(nbytes * 2, 512 * MIB)
    began = time.perf_counter()
    pair = Pair(case, nbytes, devices, arena)
    try:
        whole = 1 << (pair.nbytes - 1).bit_length()
        ways: dict[str, Callable[[], float]] = {
            "one write": pair.raw,
            "pipelined": lambda: pair.run(Setting("always"))[0],
            "decided": lambda: pair.run(Setting("cost"))[0],
        }
        if whole <= arena:
            ways["in series"] = lambda: pair.run(Setting("always", whole, 1))[0]
        if pair.fragments <= MANY:
            ways["direct"] = lambda: pair.run(Setting("never"))[0]
        for run in ways.values():
            run()
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                samples[name].append(run())
        _, notice = pair.run(Setting("cost"))
        stats = notice.stats
        return {
            "case": case.name,
            "bytes": pair.nbytes,
            "fragments": pair.fragments,
            "seconds": {name: statistics.median(values) for name, values in samples.items()},
            "least": {name: min(values) for name, values in samples.items()},
            "decided": {
                "bounced": stats.bounced > 0,
                "descriptors": stats.descriptors,
                "predicted": stats.predicted,
                "writer": stats.wire,
                "plan": stats.plan,
                "post": stats.post,
            },
            "cost": str(pair.cost),
            "path": stats.path,
            "set up": time.perf_counter() - began,
        }
    finally:
        pair.close()


def main() -> int:
    """Prints one line of JSON for each case as soon as it is measured; ends early at the deadline."""
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cases, 16 MiB: under a minute")
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--mib", type=int, nargs="*", help="sizes; default 32 on the host, 256 and 1024 on GPUs")
    parser.add_argument("--case", nargs="*", help="only cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--regret", type=int, metavar="POINTS", help="instead: the regret of each gate; 200 is usual")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no case is begun")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured to FILE")
    options = parser.parse_args()
    if options.regret:
        return regret(options.device, options.regret, options.json)
    devices = (0, 1) if options.device == "cuda" else (None, None)
    sizes = options.mib or ([16] if options.quick else [256, 1024] if options.device == "cuda" else [32])
    names = options.case or (["NHD", "contiguous"] if options.quick else [""])
    cases = [case for case in CASES if any(case.name.startswith(name) for name in names)]
    began, results = time.perf_counter(), list[dict[str, object]]()
    for size in sizes:
        for case in cases:
            if time.perf_counter() - began > options.deadline:
                print("deadline", file=sys.stderr)
                break
            result = measure(case, size * MIB, devices, 3 if options.quick else options.rounds)
            results.append(result)
            print(json.dumps(result), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    _print("transfers", [row for result in results for row in rows(result, options.device)])
    return 0


def regret(device: str, points: int, json_file: Path | None) -> int:
    """Measures, prints and writes the table of regrets, with the points that it comes from."""
    import transfer_regret

    found = transfer_regret.measure(device, points, told=lambda one: print(json.dumps(asdict(one)), flush=True))
    table = transfer_regret.rows(found)
    if json_file is not None:
        written = {"points": [asdict(one) for one in found], "rows": [asdict(one) for one in table]}
        json_file.write_text(json.dumps(written, indent=1) + "\n")
    _print("regret", table)
    return 0


def _print(title: str, table: list[Row]) -> None:
    if importlib.util.find_spec("rich") is not None:
        # Not on every machine with GPUs; the lines of JSON say the same.
        from report import show

        show(title, table)


def rows(result: dict[str, Any], device: str) -> list[Row]:
    """What is aimed at, of one case and size."""
    from report import at_least, at_most

    seconds, name = result["seconds"], f"{result['case']}, {result['bytes'] >> 20} MiB"
    rate = {way: result["bytes"] / took / 1e9 for way, took in seconds.items()}
    best = max(rate[way] for way in ("direct", "in series", "pipelined") if way in rate)
    made = [at_least(f"{name}: decided / best way", rate["decided"], "GB/s", best, 0.9)]
    if result["case"] == "contiguous":
        least = 0.95 if device == "cuda" else 0.9
        made.append(at_least(f"{name}: decided / one write", rate["decided"], "GB/s", rate["one write"], least))
    elif device == "cuda":
        least = 0.9 if result["bytes"] >= 1 << 30 else 0.8
        made.append(at_least(f"{name}: decided / one write", rate["decided"], "GB/s", rate["one write"], least))
    if "direct" in seconds:
        made.append(at_most(f"{name}: decided / direct", seconds["decided"], "s", seconds["direct"], 1.1))
    return made


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # NIXL's UCX crashes in the C library's exit handlers.
    os._exit(code)
