"""Why to split: gaps between the tokens of running answers while long prompts arrive, split against unsplit.

    python benchmarks/split.py [--quick] [--json FILE] [--plot FILE.svg] [--model default] [--devices cuda:0 cuda:1]

Two clusters of two workers each, one pinned core (or device) a worker: 1 context + 1 generation, and 2 unsplit. Both
get the same running answers and the same arrivals of long prompts, in turn. Then the same without long prompts, where
nothing is gained: an unsplit cluster has twice the decoders.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml
from report import Row, argument_parser, at_most, figure, show
from rich.console import Console
from split_plot import write_plot

from isthmus_client import Client
from isthmus_client.local import prepare_cluster
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster

SHORT_PROMPT = 32
VOCAB = 4096


@dataclass(slots=True)
class Round:
    """What one round has seen, in seconds: gaps between tokens, waits for the first token of a long prompt."""

    gaps: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    tokens: int = 0
    seconds: float = 0.0


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="default", help="default, or a folder")
    parser.add_argument("--answers", type=int, default=4, help="answers that run all the time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a long prompt")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between long prompts, on average")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3, help="of each cluster")
    parser.add_argument("--chunk", type=int, default=128, help="engine.max_batch_tokens")
    parser.add_argument(
        "--cache", type=int, default=1 << 30, metavar="BYTES", help="engine.kv_cache_bytes of each worker"
    )
    parser.add_argument("--devices", nargs=2, metavar="DEVICE", help="of the two workers; default: a core each")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the distribution of the gaps as SVG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, min(arguments.seconds, 15.0)
    return arguments


async def keep_answering(client: Client, draw: random.Random, until: float, seen: Round) -> None:
    """One answer after the other until the end of the round. The first gap of an answer is not counted: it holds the
    hand-off."""
    while time.perf_counter() < until:
        prompt = [draw.randrange(4, VOCAB) for _ in range(SHORT_PROMPT)]
        times: list[float] = []
        async for part in client.generate(prompt, max_tokens=256, ignore_eos=True, temperature=0.0):
            now = time.perf_counter()
            if now > until:
                break
            if part.token_ids:
                times.append(now)
        seen.tokens += len(times)
        seen.gaps += np.diff(times[1:]).tolist()


async def long_prompts(client: Client, arguments: argparse.Namespace, seed: int, until: float, seen: Round) -> None:
    """Long prompts at the same moments in every round of this seed; two tokens of answer each."""
    draw = random.Random(seed)
    running: list[asyncio.Task[None]] = []

    async def one(prompt: Sequence[int]) -> None:
        began, waiting = time.perf_counter(), True
        async for part in client.generate(prompt, max_tokens=2, ignore_eos=True, temperature=0.0):
            if waiting and part.token_ids:
                seen.waits.append(time.perf_counter() - began)
                waiting = False

    while (now := time.perf_counter()) < until:
        await asyncio.sleep(min(draw.expovariate(1 / arguments.every), until - now))
        if time.perf_counter() < until:
            prompt = [draw.randrange(4, VOCAB) for _ in range(arguments.prompt)]
            running.append(asyncio.create_task(one(prompt)))
    await asyncio.gather(*running)


async def play(client: Client, arguments: argparse.Namespace, seed: int, *, prompts: bool) -> Round:
    """One round."""
    seen, began = Round(), time.perf_counter()
    until = began + arguments.seconds
    work = [keep_answering(client, random.Random(seed + number), until, seen) for number in range(arguments.answers)]
    if prompts:
        work.append(long_prompts(client, arguments, seed, until, seen))
    await asyncio.gather(*work)
    seen.seconds = arguments.seconds
    return seen


async def measure(clients: dict[str, Client], arguments: argparse.Namespace) -> dict[tuple[str, bool], list[Round]]:
    """All rounds, the clusters in turn. Key: the cluster, and whether long prompts arrive."""
    found: dict[tuple[str, bool], list[Round]] = {}
    for client in clients.values():
        warm = argparse.Namespace(**{**vars(arguments), "seconds": 2.0, "every": 1.0})
        await play(client, warm, 0, prompts=True)
    for seed in range(arguments.rounds):
        for prompts in (True, False):
            for name, client in clients.items():
                found.setdefault((name, prompts), []).append(await play(client, arguments, seed, prompts=prompts))
    return found


def rows_of(found: dict[tuple[str, bool], list[Round]]) -> list[Row]:
    """The figures: medians over rounds."""

    def over(name: str, prompts: bool, share: float) -> float:
        return float(np.median([np.percentile(one.gaps, share) * 1e3 for one in found[name, prompts]]))

    def rate(name: str, prompts: bool) -> float:
        return float(np.median([one.tokens / one.seconds for one in found[name, prompts]]))

    def wait(name: str) -> float:
        return float(np.median([wait for one in found[name, True] for wait in one.waits]) * 1e3)

    split, unsplit = "split", "unsplit"
    return [
        at_most(
            "gap between tokens p99, long prompts arrive", over(split, True, 99), "ms", over(unsplit, True, 99), 0.5
        ),
        at_most(
            "gap between tokens p50, long prompts arrive", over(split, True, 50), "ms", over(unsplit, True, 50), 1.2
        ),
        figure("first token of a long prompt, split, median", wait(split), "ms"),
        figure("first token of a long prompt, unsplit, median", wait(unsplit), "ms"),
        figure("tokens, long prompts arrive, split", rate(split, True), "tok/s"),
        figure("tokens, long prompts arrive, unsplit", rate(unsplit, True), "tok/s"),
        figure("tokens, no long prompts, split", rate(split, False), "tok/s"),
        figure("tokens, no long prompts, unsplit", rate(unsplit, False), "tok/s"),
    ]


def pin(cluster: LocalCluster, cores: Sequence[int]) -> None:
    """Every thread of worker i on core i."""
    names = [spec.name for spec in cluster.specs if spec.module == "isthmus_worker"]
    for name, core in zip(names, cores, strict=True):
        hub = psutil.Process(cluster.process(name).pid)
        for process in (hub, *hub.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


async def prepare(kind: str, arguments: argparse.Namespace, folder: Path) -> LocalCluster:
    """A cluster that has not been started."""
    settings = folder / "settings.yaml"
    engine = {"max_batch_tokens": arguments.chunk, "kv_cache_bytes": arguments.cache, "prefix_caching": False}
    engine["num_threads"] = 1
    settings.write_text(json.dumps({"engine": engine, "telemetry": {"sample_ratio": 0.0}}))
    counts = {"split": (1, 1, 0), "unsplit": (0, 0, 2)}[kind]
    cluster = await prepare_cluster(
        context=counts[0],
        generation=counts[1],
        unsplit=counts[2],
        engine="torch",
        model=arguments.model,
        config=settings,
        log_dir=None,
        ports=(0, 0, 0),
        report=Console(stderr=True).print,
    )
    workers = [spec for spec in cluster.specs if spec.module == "isthmus_worker"]
    for spec, device in zip(workers, arguments.devices or (), strict=bool(arguments.devices)):
        path = cluster.run.config / f"{spec.name}.yaml"
        content = yaml.safe_load(path.read_text())
        content["engine"]["device"] = device
        path.write_text(json.dumps(content))
    return cluster


async def main() -> None:
    """Start both clusters, play the rounds, print."""
    arguments = parse_arguments()
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"isthmus-split-{os.getpid()}"
    folder.mkdir()
    clusters = {kind: await prepare(kind, arguments, folder) for kind in ("split", "unsplit")}
    found: dict[tuple[str, bool], list[Round]] = {}

    async def play_all(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for one in clusters.values():
            pin(one, (cores[0], cores[1 % len(cores)]))
        async with (
            Client(clusters["split"].grpc_endpoint) as one,
            Client(clusters["unsplit"].grpc_endpoint) as other,
        ):
            found.update(await measure({"split": one, "unsplit": other}, arguments))

    async def second(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        await run_cluster(clusters["unsplit"], play_all, start_timeout_s=300)

    await run_cluster(clusters["split"], second, start_timeout_s=300)
    show("split or not", rows_of(found), arguments.json)
    if arguments.plot is not None:
        gaps = {name: [gap for one in found[name, True] for gap in one.gaps] for name in clusters}
        write_plot(arguments.plot, gaps, "gap between the tokens of running answers while long prompts arrive")


if __name__ == "__main__":
    asyncio.run(main())
