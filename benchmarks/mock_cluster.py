"""Load on a local cluster of mock engines: what router, coordinator, hubs and the hand-off cost without a model.

    python benchmarks/mock_cluster.py [--requests 200] [--concurrency 32] [--prompt 512] [--tokens 32]

Prints requests/s and tokens/s, percentiles of time to first token, of the hand-off and of its wire part.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from isthmus_client import Answer, Client
from isthmus_client.local import prepare_cluster
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=200, help="requests in all")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate")
    parser.add_argument("--context", type=int, default=1, help="context instances")
    parser.add_argument("--generation", type=int, default=1, help="generation instances")
    return parser.parse_args()


def render(answers: list[Answer], seconds: float) -> Table:
    """Percentiles over all answers, in milliseconds."""
    timelines = [answer.end.timeline for answer in answers]
    rows = {
        "time to first token": [line.time_to_first_token_s for line in timelines],
        "hand-off": [line.handoff.total_s for line in timelines if line.handoff],
        "hand-off: wire": [line.handoff.wire_s for line in timelines if line.handoff],
        "whole request": [line.total_s for line in timelines],
    }
    tokens = sum(answer.end.completion_tokens for answer in answers)
    table = Table(title=f"{len(answers) / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s")
    for column in ("milliseconds", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "milliseconds" else "right")
    for name, values in rows.items():
        known = np.array([value for value in values if value is not None]) * 1e3
        if known.size:
            table.add_row(name, *(f"{value:.2f}" for value in np.percentile(known, [50, 90, 99, 100])))
    return table


async def load(endpoint: str, arguments: argparse.Namespace) -> tuple[list[Answer], float]:
    """Send the requests, `concurrency` at a time. Returns the answers and the seconds it took."""
    gate = asyncio.Semaphore(arguments.concurrency)
    draw = random.Random(1)
    prompts = [[draw.randrange(32, 127) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]
    async with Client(endpoint) as client:

        async def one(prompt: list[int]) -> Answer:
            async with gate:
                return await client.answer(prompt, max_tokens=arguments.tokens)

        await one(prompts[0])
        began = time.perf_counter()
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return answers, time.perf_counter() - began


async def main() -> None:
    """Start the cluster, load it, print."""
    arguments, console = parse_arguments(), Console()
    cluster = await prepare_cluster(
        context=arguments.context,
        generation=arguments.generation,
        unsplit=0,
        engine="mock",
        model=None,
        config=None,
        log_dir=None,
        ports=(0, 0, 0),
        report=console.print,
    )

    async def body(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        answers, seconds = await load(cluster.grpc_endpoint, arguments)
        console.print(render(answers, seconds))

    await run_cluster(cluster, body, start_timeout_s=60)


if __name__ == "__main__":
    asyncio.run(main())
