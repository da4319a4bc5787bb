"""Hand-offs of caches whose layouts differ, between two processes over NIXL: one write, direct, in series, pipelined.

Every run's bytes are verified. Without `--device` the caches lie in host memory.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from report import Row, argument_parser, at_least, at_most, show, write
from transfer_cases import CASES
from transfer_half import Setting
from transfer_pair import Pair

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from transfer_cases import Case

MIB = 1 << 20
# Turns of every way before those that count.
WARM = 4
# Beyond this a direct write takes longer than everything else together.
MANY = 40_000
DEVICES = "both caches on the host, both on GPUs (one or two), or one here and one there, both ways"
# Largest fragments in bytes, and how many times faster than direct writes what is decided should be.
FASTER = {"host": ((512, 3.0), (2048, 1.5), (4096, 1.2)), "cuda": ((16 << 10, 100.0),)}


def measure(case: Case, nbytes: int, devices: tuple[int | None, int | None], rounds: int) -> dict[str, object]:
    """Medians in seconds, interleaved, of one case and size."""
    arena = arena_bytes(nbytes, devices)
    began = time.perf_counter()
    pair = Pair(case, nbytes, devices, arena)
    try:
        whole = 1 << (pair.nbytes - 1).bit_length()
        planning: list[float] = []

        def decided() -> float:
            took, notice = pair.run(Setting("cost"))
            planning.append(notice.stats.queue + notice.stats.plan)
            return took

        ways: dict[str, Callable[[], float]] = {
            "one write": pair.raw,
            "pipelined": lambda: pair.run(Setting("always"))[0],
            "decided": decided,
        }
        if whole <= arena:
            ways["in series"] = lambda: pair.run(Setting("always", whole, 1))[0]
        if pair.fragments <= MANY:
            ways["direct"] = lambda: pair.run(Setting("never"))[0]
        for _ in range(WARM):
            # What the cost model learns is learnt before; stated beside the figures.
            for run in ways.values():
                run()
        planning.clear()
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, run in ways.items():
                samples[name].append(run())
        moving = [took - less for took, less in zip(samples["decided"], planning, strict=True)]
        _, notice = pair.run(Setting("cost"))
        stats = notice.stats
        return {
            "case": case.name,
            "bytes": pair.nbytes,
            "fragments": pair.fragments,
            "seconds": {name: statistics.median(values) for name, values in samples.items()},
            "least": {name: min(values) for name, values in samples.items()},
            "moving": statistics.median(moving),
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
            "devices": devices,
            "set up": time.perf_counter() - began,
        }
    finally:
        pair.close()


def main() -> int:
    """Prints one line of JSON for each case as soon as it is measured; ends early at the deadline."""
    options = _options()
    places = _devices(options.device)
    if options.regret:
        return regret(places[0], options.regret, options.json)
    cuda = options.device != "host"
    sizes = options.mib or ([16] if options.quick else [256, 1024] if cuda else [32])
    names = options.case or (["NHD", "contiguous"] if options.quick else [""])
    cases = [case for case in CASES if any(case.name.startswith(name) for name in names)]
    if options.timeline:
        return timeline(cases, sizes, places[0], options.timeline)
    began, table = time.perf_counter(), list[Row]()
    for devices, size in itertools.product(places, sizes):
        for case in cases:
            if time.perf_counter() - began > options.deadline:
                print("deadline", file=sys.stderr)
                break
            result = measure(case, size * MIB, devices, 3 if options.quick else options.rounds)
            print(json.dumps(result), flush=True)
            table += [replace(row, name=row.name + _where(devices)) for row in rows(result, options.device)]
            if options.json is not None:
                write(table, options.json)
    _print("transfers", table)
    return 0


def timeline(cases: list[Case], sizes: list[int], devices: tuple[int | None, int | None], staging: str) -> int:
    """Prints what both sides do when, with the time of a run that nobody watched before it."""
    for size, case in itertools.product(sizes, cases):
        pair = Pair(case, size * MIB, devices, arena_bytes(size * MIB, devices))
        try:
            times = sorted(pair.run(Setting(staging))[0] for _ in range(15))
            print(
                f"{case.name}, {pair.nbytes >> 20} MiB: {times[7] * 1e6:.0f} us",
                *pair.timeline(Setting(staging)),
                sep="\n",
            )
        finally:
            pair.close()
    return 0


def arena_bytes(nbytes: int, devices: tuple[int | None, int | None]) -> int:
    """An arena of twice the bytes, as far as memory is."""
    return min(nbytes * 2, 512 * MIB if None in devices else 2048 * MIB)


def _options() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=("host", "cuda", "mixed"), default="host", help=DEVICES)
    parser.add_argument("--mib", type=int, nargs="*", help="sizes; default 32 on the host, 256 and 1024 on GPUs")
    parser.add_argument("--case", nargs="*", help="only cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--regret", type=int, metavar="POINTS", help="instead: the regret of each gate; 200 is usual")
    parser.add_argument(
        "--timeline", choices=("always", "cost", "never"), help="instead: what one run of each case does"
    )
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no case is begun")
    return parser.parse_args()


def _devices(kind: str) -> list[tuple[int | None, int | None]]:
    """Where the two caches lie. On a machine with one GPU both processes use it."""
    if kind != "cuda":
        return [(None, None)] if kind == "host" else [(0, None), (None, 0)]
    import torch

    return [(0, min(1, torch.cuda.device_count() - 1))]


def _where(devices: tuple[int | None, int | None]) -> str:
    src, dst = ("host" if one is None else f"GPU {one}" for one in devices)
    return "" if src == dst == "host" else f", {src} to {dst}"


def regret(devices: tuple[int | None, int | None], points: int, json_file: Path | None) -> int:
    """Measures, prints and writes the table of regrets; the points that it comes from are lines on standard output."""
    import transfer_regret

    found = transfer_regret.measure(devices, points, told=lambda one: print(json.dumps(asdict(one)), flush=True))
    table = transfer_regret.rows(found)
    if json_file is not None:
        write(table, json_file)
    _print("regret" + _where(devices), table)
    return 0


def _print(title: str, table: list[Row]) -> None:
    if importlib.util.find_spec("rich") is not None:
        # Not on every machine with GPUs; the lines of JSON say the same.
        show(title, table)


def rows(result: dict[str, Any], device: str) -> list[Row]:
    """What is aimed at, of one case and size."""
    seconds, name = result["seconds"], f"{result['case']}, {result['bytes'] >> 20} MiB"
    rate = {way: result["bytes"] / took / 1e9 for way, took in seconds.items()}
    best = max(rate[way] for way in ("direct", "in series", "pipelined") if way in rate)
    made = [at_least(f"{name}: decided / best way", rate["decided"], "GB/s", best, 0.9)]
    if device == "mixed":
        # One write across goes another way, without a word.
        return [*made, at_least(f"{name}: decided / one write", rate["decided"], "GB/s", rate["one write"], 5)]
    moving = result["bytes"] / result["moving"] / 1e9
    if result["case"] == "contiguous":
        least = 0.95 if device == "cuda" else 0.9
        made.append(at_least(f"{name}: decided, planned / one write", moving, "GB/s", rate["one write"], least))
        made.append(at_least(f"{name}: decided / one write", rate["decided"], "GB/s", rate["one write"], least))
    elif device == "cuda":
        least = 0.9 if result["bytes"] >= 1 << 30 else 0.8
        made.append(at_least(f"{name}: decided, planned / one write", moving, "GB/s", rate["one write"], least))
        made.append(at_least(f"{name}: decided / one write", rate["decided"], "GB/s", rate["one write"], least))
        if "in series" in seconds and result["bytes"] >= 512 * MIB:
            made.append(at_least(f"{name}: decided / in series", rate["decided"], "GB/s", rate["in series"], 1.15))
    if "direct" in seconds:
        made.append(at_most(f"{name}: decided / direct", seconds["decided"], "s", seconds["direct"], 1.1))
        mean = result["bytes"] / result["fragments"]
        for size, least in [one for one in FASTER[device] if mean <= one[0]][:1]:
            faster = f"{name}: decided / direct, fragments of at most {size} bytes"
            made.append(at_least(faster, rate["decided"], "GB/s", rate["direct"], least))
    return made


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # NIXL's UCX crashes in the C library's exit handlers.
    os._exit(code)
