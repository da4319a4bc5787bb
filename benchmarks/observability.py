"""What traces and metrics cost: the same load with everything on and with everything off, in turn.

    python benchmarks/observability.py [--quick] [--json FILE] [--requests 400] [--concurrency 16] [--ratio 0.1]

Two clusters of mock engines stand side by side, one of which traces to a receiver (a process of its own), counts, and
is scraped every five seconds. Rounds go to both in turn. Rates are compared by the clock, and by the CPU time of a
request, which what else runs on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from report import Row, argument_parser, below, figure, show

from isthmus_client import Answer, Client
from isthmus_client.plan import ClusterOptions
from isthmus_client.runs import create_run
from isthmus_client.supervisor import LocalCluster, choose_ports

ROUNDS = 7
# Prometheus' own default is 15 s; deploy/ has 5 s.
SCRAPE_S = 5.0
RECEIVER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from otlp import OtlpReceiver
async def main():
    async with OtlpReceiver() as receiver:
        print(receiver.endpoint, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=400, help="requests of a round")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate")
    parser.add_argument("--ratio", type=float, default=0.1, help="share of requests that are traced")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests = min(arguments.requests, 150)
    return arguments


def cpu_seconds(cluster: LocalCluster) -> float:
    """CPU time of all processes of a cluster, engines included."""
    total = 0.0
    for spec in cluster.specs:
        process = psutil.Process(cluster.process(spec.name).pid)
        for one in (process, *process.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


async def load(client: Client, arguments: argparse.Namespace, seed: int) -> tuple[float, list[float]]:
    """One round: requests per second, and times to the first token in ms."""
    gate = asyncio.Semaphore(arguments.concurrency)
    draw = random.Random(seed)
    prompts = [[draw.randrange(32, 127) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]

    async def one(prompt: list[int]) -> Answer:
        async with gate:
            return await client.answer(prompt, max_tokens=arguments.tokens)

    began = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    took = time.perf_counter() - began
    return len(answers) / took, [(one.end.timeline.time_to_first_token_s or 0.0) * 1e3 for one in answers]


async def first_tokens(client: Client, arguments: argparse.Namespace, seed: int) -> float:
    """Median time to the first token in ms, of requests that come one by one."""
    draw = random.Random(seed)
    times: list[float] = []
    for _ in range(20):
        prompt = [draw.randrange(32, 127) for _ in range(arguments.prompt)]
        answer = await client.answer(prompt, max_tokens=2)
        times.append((answer.end.timeline.time_to_first_token_s or 0.0) * 1e3)
    return statistics.median(times)


@contextlib.asynccontextmanager
async def receiver() -> AsyncGenerator[str]:
    """An OTLP receiver in a process of its own."""
    support = Path(__file__).parents[1] / "tests" / "support"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RECEIVER, str(support), stdout=asyncio.subprocess.PIPE
    )
    try:
        if process.stdout is None:
            raise SystemExit("no pipe from the receiver")
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


async def scrape(cluster: LocalCluster) -> None:
    """Read /metrics of every process again and again."""
    ports: list[int] = []
    for spec in cluster.specs:
        found = re.search(r"metrics at port (\d+)", cluster.process(spec.name).log_path.read_text())
        if found is None:
            raise SystemExit(f"{spec.name} has no metrics")
        ports.append(int(found.group(1)))

    def read(port: int) -> None:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()

    while True:
        await asyncio.gather(*(asyncio.to_thread(read, port) for port in ports))
        await asyncio.sleep(SCRAPE_S)


async def measure(on: LocalCluster, off: LocalCluster, arguments: argparse.Namespace) -> list[Row]:
    """All rounds."""
    rates: dict[str, list[float]] = {"on": [], "off": []}
    cpu: dict[str, list[float]] = {"on": [], "off": []}
    idle: dict[str, list[float]] = {"on": [], "off": []}
    busy: dict[str, list[float]] = {"on": [], "off": []}
    clusters = {"on": on, "off": off}
    async with Client(on.grpc_endpoint) as one, Client(off.grpc_endpoint) as other:
        clients = {"on": one, "off": other}
        for client in clients.values():
            await load(client, arguments, 0)
        for number in range(1, ROUNDS + 1):
            order = ("on", "off") if number % 2 else ("off", "on")
            for name in order:
                before = cpu_seconds(clusters[name])
                rate, waits = await load(clients[name], arguments, number)
                cpu[name].append((cpu_seconds(clusters[name]) - before) / arguments.requests * 1e3)
                rates[name].append(rate)
                busy[name].append(statistics.median(waits))
            for name in order:
                idle[name].append(await first_tokens(clients[name], arguments, number))
    return rows(rates, cpu, idle, busy)


def rows(
    rates: dict[str, list[float]],
    cpu: dict[str, list[float]],
    idle: dict[str, list[float]],
    busy: dict[str, list[float]],
) -> list[Row]:
    """Medians over the rounds of the differences within each round."""

    def pairs(of: dict[str, list[float]]) -> zip[tuple[float, float]]:
        return zip(of["on"], of["off"], strict=True)

    lost = statistics.median(1 - on / off for on, off in pairs(rates)) * 100
    more_cpu = statistics.median(on / off - 1 for on, off in pairs(cpu)) * 100
    later = statistics.median(on - off for on, off in pairs(idle))
    later_busy = statistics.median(on - off for on, off in pairs(busy))
    return [
        figure("requests per second, off", statistics.median(rates["off"]), "req/s"),
        below("requests per second lost by telemetry", lost, "%", 3.0),
        figure("CPU of a request, off", statistics.median(cpu["off"]), "ms"),
        below("CPU of a request, more by telemetry", more_cpu, "%", 3.0),
        below("time to first token p50 later by telemetry", later, "ms", 1.0),
        figure("the same under load", later_busy, "ms"),
    ]


async def main() -> None:
    """Start both clusters, load them, print."""
    arguments = parse_arguments()
    found: list[Row] = []
    async with receiver() as endpoint:
        telemetry = {"otlp_endpoint": endpoint, "sample_ratio": arguments.ratio, "metrics_listen": "127.0.0.1:0"}
        options = ClusterOptions(context=1, generation=1, engine="mock")
        with TemporaryDirectory() as folder:
            clusters: list[LocalCluster] = []
            try:
                for name, own in (("on", {"telemetry": telemetry}), ("off", {})):
                    run = create_run(None, Path(folder) / name)
                    these = replace(options, base=own)
                    cluster = LocalCluster(these, choose_ports(len(options.workers)), run, report=lambda _: None)
                    clusters.append(cluster)
                    await cluster.start(60)
                scraping = asyncio.create_task(scrape(clusters[0]))
                found = await measure(clusters[0], clusters[1], arguments)
                scraping.cancel()
            finally:
                for cluster in clusters:
                    await cluster.stop()
    show(f"telemetry on and off, {arguments.ratio:.0%} of the requests traced", found, arguments.json)


if __name__ == "__main__":
    asyncio.run(main())
