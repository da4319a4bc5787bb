"""What the front door does a second and what it costs: streamed completions through router and mock engines.

    python benchmarks/router.py [--quick] [--json FILE] [--processes 2] [--model FOLDER] [--peer NAME=URL=MODEL=PIDS]...

Rounds are interleaved: every case gets each number of concurrent requests once a round. `--peer` adds any server with
OpenAI's API that is running already (Dynamo's frontend, sglang-router): the same requests, the same rounds; PIDS, with
commas between them, are its processes, whose CPU time (their children's too) is counted; `router_peers.sh` starts both
of those and runs this. Give it engines with the same
timing as `--decode-us`, and `--model` its tokenizer: without one tokens are bytes here.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import psutil
import uvloop
from http_load import Load, run_load
from report import Row, argument_parser, figure, show

from isthmus_client.plan import ClusterOptions
from isthmus_client.runs import create_run
from isthmus_client.supervisor import LocalCluster, choose_ports
from isthmus_core.process import free_port

CONCURRENT = (1, 16, 64, 256)
TOKENS = 32
PROMPT = 64


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2, help="router processes of the second case")
    parser.add_argument("--decode-us", type=float, default=1000.0, help="time of a step of the mock engine")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer; default: bytes")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL=MODEL=PIDS", help="a running server")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    return arguments


@asynccontextmanager
async def cluster(
    folder: Path, decode_us: float, model: Path | None = None, **router: object
) -> AsyncGenerator[LocalCluster, None]:
    """A split pair of mock engines behind a router with these settings. `model`: whose tokenizer."""
    base = {
        "engine": {"mock": {"decode_us": decode_us}, "max_running": 512, "max_batch_tokens": 4096},
        "router": router,
    }
    options = ClusterOptions(context=1, generation=1, engine="mock", model_path=model, model_name="mock", base=base)
    run = create_run(None, folder)
    running = LocalCluster(options, choose_ports(2), run, report=print)
    try:
        await running.start(180)
        yield running
    finally:
        await running.stop()


async def all_serve(control: str) -> None:
    """Wait until every process of the fleet serves. Raises TimeoutError."""
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as http:
        while True:
            processes = (await http.get(f"http://{control}/health")).json()["processes"]
            if all(row["status"] == "ok" for row in processes.values()):
                return
            await asyncio.sleep(0.1)


def bodies(model: str, count: int, seed: int) -> list[dict[str, object]]:
    """Requests with prompts of their own."""
    draw = random.Random(seed)
    texts = ["".join(chr(draw.randrange(97, 123)) for _ in range(PROMPT)) for _ in range(count)]
    rest = {"max_tokens": TOKENS, "stream": True, "temperature": 0, "ignore_eos": True}
    return [{"model": model, "prompt": text, **rest} for text in texts]


def round_of(model: str, concurrent: int, number: int) -> list[dict[str, object]]:
    """The same for everybody; no prompt is asked twice."""
    return bodies(model, _count(concurrent), 1000 * number + concurrent)


def cpu_s(running: LocalCluster) -> dict[str, float]:
    """CPU seconds of each process and its children so far."""
    return {spec.name: cpu_of(running.process(spec.name).pid) for spec in running.specs}


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and its children so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def measure_peer(where: str, number: int) -> tuple[dict[int, Load], dict[str, float]]:
    """One round of a peer: by number of concurrent requests, and CPU seconds per 1,000 tokens by process."""
    url, model, pids = where.rsplit("=", 2)
    await run_load(url, bodies(model, 32, 0), 8)
    before, loads, tokens = {pid: cpu_of(int(pid)) for pid in pids.split(",")}, dict[int, Load](), 0
    for concurrent in CONCURRENT:
        loads[concurrent] = await run_load(url, round_of(model, concurrent, number), concurrent)
        tokens += _count(concurrent) * TOKENS
    used: dict[str, float] = {}
    for pid, was in before.items():
        name = name_of(int(pid))
        used[name] = used.get(name, 0.0) + (cpu_of(int(pid)) - was) / tokens * 1e3
    return loads, used


def name_of(pid: int) -> str:
    """What a process runs: its module or script."""
    process = psutil.Process(pid)
    # A process may have put a title in the place of its arguments.
    names = [Path(part).name for part in process.cmdline()[1:] if part and not part.startswith("-")]
    return names[0] if names else process.name()


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Row]:
    """All rounds."""
    control = f"127.0.0.1:{free_port()}"
    fleet: dict[str, object] = {"num_workers": arguments.processes, "control_listen": control}
    many = f"{arguments.processes} processes"
    ours: dict[str, dict[str, object]] = {"1 process": {}, many: fleet, f"{many}, 5 ms": {**fleet, "coalesce_ms": 5.0}}
    loads: dict[tuple[str, int], list[Load]] = {}
    cpu: dict[str, list[dict[str, float]]] = {}
    peers = dict(peer.split("=", 1) for peer in arguments.peer)
    for number in range(arguments.rounds):
        for name, settings in ours.items():
            async with AsyncExitStack() as stack:
                running = await stack.enter_async_context(
                    cluster(folder / f"{number}-{name[0]}{len(name)}", arguments.decode_us, arguments.model, **settings)
                )
                if settings:
                    await all_serve(control)
                await run_load(running.http_endpoint, bodies("mock", 32, 0), 8)
                before, tokens = cpu_s(running), 0
                for concurrent in CONCURRENT:
                    load = await run_load(running.http_endpoint, round_of("mock", concurrent, number), concurrent)
                    loads.setdefault((name, concurrent), []).append(load)
                    tokens += _count(concurrent) * TOKENS
                used = {part: (after - before[part]) / tokens * 1e3 for part, after in cpu_s(running).items()}
                cpu.setdefault(name, []).append(used)
        for name, where in peers.items():
            found, used = await measure_peer(where, number)
            for concurrent, load in found.items():
                loads.setdefault((name, concurrent), []).append(load)
            cpu.setdefault(name, []).append(used)
    rows: list[Row] = []
    for (name, concurrent), several in sorted(loads.items(), key=lambda item: (item[0][1], item[0][0])):
        label = f"{name}, {concurrent} concurrent"
        rows.append(figure(f"{label}: rate", statistics.median(one.rate for one in several), "req/s"))
        for quantile in (0.5, 0.99):
            first = statistics.median(one.first_ms(quantile) for one in several)
            rows.append(figure(f"{label}: first token p{quantile * 100:.0f}", first, "ms"))
    for name, several in cpu.items():
        for part in several[0]:
            seconds = statistics.median(one[part] for one in several)
            rows.append(figure(f"{name}: CPU of {part}", seconds, "s / 1,000 tokens"))
        rows.append(
            figure(f"{name}: CPU in all", statistics.median(sum(one.values()) for one in several), "s / 1,000 tokens")
        )
    return rows


def _count(concurrent: int) -> int:
    return 20 if concurrent == 1 else max(64, concurrent * 2)


async def main() -> None:
    """Measure and show."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        rows = await measure(arguments, Path(folder))
    title = f"router: {PROMPT} prompt tokens, {TOKENS} tokens, steps of {arguments.decode_us:g} us"
    show(title, rows, arguments.json)


if __name__ == "__main__":
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(main())
