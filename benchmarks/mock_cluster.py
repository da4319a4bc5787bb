"""Load on a local cluster of mock engines: what router, coordinator, hubs and the hand-off cost without a model.

    python benchmarks/mock_cluster.py [--quick] [--json FILE] [--requests 200] [--concurrency 32] [--prompt 512]

The same requests go to a split pair and to one unsplit instance in turn: the ratio is what splitting costs where there
is nothing to gain from it. Then the parts of the hand-off itself, and its first use against its tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time

import numpy as np
from report import Row, argument_parser, at_least, at_most, below, figure, show
from rich.console import Console

from isthmus_client import Answer, Client
from isthmus_client.local import prepare_cluster
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster

ROUNDS = 3


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="requests of a round")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests = min(arguments.requests, 100)
    return arguments


async def load(client: Client, arguments: argparse.Namespace, seed: int) -> tuple[list[Answer], float]:
    """Send one round of requests, `concurrency` at a time. Returns the answers and requests per second."""
    gate = asyncio.Semaphore(arguments.concurrency)
    draw = random.Random(seed)
    prompts = [[draw.randrange(32, 127) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            return await client.answer(prompt, max_tokens=arguments.tokens)

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return answers, len(answers) / (time.perf_counter() - began)


async def one_by_one(client: Client, arguments: argparse.Namespace, count: int) -> list[Answer]:
    """Requests with nobody else in the cluster."""
    draw = random.Random(0)
    prompts = [[draw.randrange(32, 127) for _ in range(arguments.prompt)] for _ in range(count)]
    return [await client.answer(prompt, max_tokens=2) for prompt in prompts]


def control_ms(answer: Answer) -> float:
    """What a hand-off takes beside the bytes: from asking for the cache to the complete manifest, less the wire."""
    total, wire = _handoff(answer)
    return (total - wire) * 1e3


def handoff_ms(answer: Answer) -> float:
    """The whole hand-off."""
    return _handoff(answer)[0] * 1e3


def _handoff(answer: Answer) -> tuple[float, float]:
    handoff = answer.end.timeline.handoff
    if handoff is None or handoff.total_s is None:
        raise SystemExit("the split cluster answered a request without a hand-off")
    return handoff.total_s, handoff.wire_s or 0.0


async def measure(split: Client, unsplit: Client, arguments: argparse.Namespace) -> list[Row]:
    """All figures, the two clusters in turn."""
    idle = await one_by_one(split, arguments, 40)
    await one_by_one(unsplit, arguments, 3)
    busy: list[Answer] = []
    rates: dict[str, list[float]] = {"split": [], "unsplit": []}
    for number in range(1, ROUNDS + 1):
        answers, rate = await load(split, arguments, number)
        busy += answers
        rates["split"].append(rate)
        rates["unsplit"].append((await load(unsplit, arguments, number))[1])
    first, tenth = handoff_ms(idle[0]), statistics.median(handoff_ms(one) for one in idle[5:15])
    control = np.array([control_ms(one) for one in busy])
    both = [statistics.median(rates[kind]) for kind in ("split", "unsplit")]
    waits = [one.end.timeline.time_to_first_token_s or 0.0 for one in busy]
    return [
        at_least("requests, split in two; one unsplit instance", both[0], "req/s", both[1], 0.5),
        below("hand-off less wire, engines idle, median", statistics.median(map(control_ms, idle[3:])), "ms", 2.0),
        figure("hand-off less wire, engines busy, median", float(np.median(control)), "ms"),
        figure("hand-off less wire, engines busy, p99", float(np.percentile(control, 99)), "ms"),
        at_most("first hand-off of a pair; its tenth", first, "ms", tenth, 1.5),
        figure("time to first token, busy, median", statistics.median(waits) * 1e3, "ms"),
    ]


async def prepare(context: int, generation: int, unsplit: int, console: Console) -> LocalCluster:
    """A cluster of mock engines, not yet started."""
    return await prepare_cluster(
        context=context,
        generation=generation,
        unsplit=unsplit,
        engine="mock",
        model=None,
        config=None,
        log_dir=None,
        ports=(0, 0, 0),
        report=console.print,
    )


async def main() -> None:
    """Start both clusters, load them, print."""
    arguments, console = parse_arguments(), Console(stderr=True)
    split, unsplit = await prepare(1, 1, 0, console), await prepare(0, 0, 1, console)
    rows: list[Row] = []

    async def both(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        async with Client(split.grpc_endpoint) as one, Client(cluster.grpc_endpoint) as other:
            rows.extend(await measure(one, other, arguments))

    async def first(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        await run_cluster(unsplit, both, start_timeout_s=60)

    await run_cluster(split, first, start_timeout_s=60)
    show("mock cluster", rows, arguments.json)


if __name__ == "__main__":
    asyncio.run(main())
