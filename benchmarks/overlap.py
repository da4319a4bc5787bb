"""Computing goes on while caches move: the workers' own record of a few requests, drawn and added up.

    python benchmarks/overlap.py [--quick] [--json FILE] [--plot FILE.svg] [--schedule generation_first]

One context and one generation worker. Answers run on the generation worker while long prompts arrive: their caches are
sent, and received, while the next prompt is computed and the answers go on. What is counted is how much of the time in
which a cache was on its way something else was computed on the same instance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from isthmus.v1 import timeline_pb2, worker_service_pb2_grpc
from overlap_plot import Bar, Lane, write_overlap
from report import Row, argument_parser, at_least, figure, show
from rich.console import Console

from isthmus_client import Client
from isthmus_client.client import get_cluster
from isthmus_client.local import prepare_cluster
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster
from isthmus_core.rpc import open_channel

VOCAB = 4096
KINDS = {
    timeline_pb2.TIMELINE_KIND_QUEUE: "queue",
    timeline_pb2.TIMELINE_KIND_PREFILL_CHUNK: "prefill",
    timeline_pb2.TIMELINE_KIND_TRANSFER: "send",
    timeline_pb2.TIMELINE_KIND_RECEIVE: "receive",
    timeline_pb2.TIMELINE_KIND_DECODE: "decode",
}


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--schedule", default="generation_first", choices=("context_first", "generation_first"))
    parser.add_argument("--model", default="default", help="default, or a folder")
    parser.add_argument("--answers", type=int, default=3, help="answers that run from the start")
    parser.add_argument("--prompts", type=int, default=3, help="long prompts")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of a long prompt")
    parser.add_argument("--chunk", type=int, default=128, help="engine.max_batch_tokens")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the timelines as SVG")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.prompts = min(arguments.prompts, 2)
    return arguments


async def play(client: Client, arguments: argparse.Namespace) -> None:
    """Answers to short prompts, and long prompts at once when all of them run."""
    draw = random.Random(1)
    running = [asyncio.Event() for _ in range(arguments.answers)]

    async def answer(runs: asyncio.Event) -> None:
        prompt = [draw.randrange(4, VOCAB) for _ in range(16)]
        said = 0
        async for part in client.generate(prompt, max_tokens=160, ignore_eos=True, temperature=0.0):
            said += len(part.token_ids)
            if said >= 4:
                runs.set()

    async def long_prompt() -> None:
        prompt = [draw.randrange(4, VOCAB) for _ in range(arguments.prompt)]
        async for _ in client.generate(prompt, max_tokens=8, ignore_eos=True, temperature=0.0):
            pass

    answers = [asyncio.create_task(answer(runs)) for runs in running]
    await asyncio.gather(*(runs.wait() for runs in running))
    await asyncio.gather(*answers, *(long_prompt() for _ in range(arguments.prompts)))


async def record(cluster: LocalCluster, legs: int) -> dict[str, list[Lane]]:
    """What each worker remembers of its latest legs, oldest first, in seconds of Unix time."""
    found: dict[str, list[Lane]] = {}
    for member in (await get_cluster(cluster.coordinator_endpoint)).members:
        async with open_channel(member.instance.endpoint) as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            answer = await stub.GetTimeline(timeline_pb2.GetTimelineRequest(limit=legs))
        lanes = [
            Lane(
                f"{leg.prompt_tokens} tokens",
                [
                    Bar(KINDS[one.kind], one.begin_unix_ns / 1e9, (one.begin_unix_ns + one.duration_ns) / 1e9)
                    for one in leg.entries
                    if one.kind in KINDS
                ],
            )
            for leg in reversed(answer.legs)
        ]
        found[answer.legs[0].leg] = lanes
    return found


def covered(lanes: Sequence[Lane], moving: str, computing: str) -> tuple[float, float]:
    """Seconds in which a cache was on its way, and the part of them in which something was computed."""
    total = both = 0.0
    busy = sorted((bar.begin, bar.end) for lane in lanes for bar in lane.bars if bar.kind == computing)
    for lane in lanes:
        for move in (bar for bar in lane.bars if bar.kind == moving):
            total += move.end - move.begin
            at = move.begin
            for begin, end in busy:
                first, last = max(at, begin), min(end, move.end)
                if first < last:
                    both += last - first
                    at = last
    return total, both


def rows_of(found: dict[str, list[Lane]]) -> list[Row]:
    """The figures."""
    rows: list[Row] = []
    for leg, moving, computing in (("generation", "receive", "decode"), ("context", "send", "prefill")):
        total, both = covered(found[leg], moving, computing)
        rows.append(figure(f"{leg}: caches on their way ({moving})", total * 1e3, "ms"))
        rows.append(at_least(f"{leg}: of it in steps of {computing}", both * 1e3, "ms", total * 1e3, 0.5))
    return rows


async def main() -> None:
    """Start the cluster, play, read the record, print and draw."""
    arguments = parse_arguments()
    with TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.yaml"
        engine = {"max_batch_tokens": arguments.chunk, "prefix_caching": False, "num_threads": 1}
        settings.write_text(json.dumps({"engine": engine, "router": {"schedule": arguments.schedule}}))
        cluster = await prepare_cluster(
            context=1,
            generation=1,
            unsplit=0,
            engine="torch",
            model=arguments.model,
            config=settings,
            log_dir=None,
            ports=(0, 0, 0),
            report=Console(stderr=True).print,
        )

        async def body(cluster: LocalCluster, stopping: asyncio.Event) -> None:
            async with Client(cluster.grpc_endpoint) as client:
                await play(client, arguments)
            found = await record(cluster, arguments.answers + arguments.prompts)
            show(f"overlap, {arguments.schedule}", rows_of(found), arguments.json)
            if arguments.plot is not None:
                title = f"{arguments.schedule}: prompts of {arguments.prompt} tokens arrive while answers run"
                write_overlap(arguments.plot, title, {f"{leg} instance": lanes for leg, lanes in found.items()})

        await run_cluster(cluster, body, start_timeout_s=300)


if __name__ == "__main__":
    asyncio.run(main())
