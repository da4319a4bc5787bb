"""Decoding alone in a split pair: tokens per second of a full batch, with `transfer.fill_gate` and without.

    python benchmarks/fill_gate.py [--quick] [--json FILE] [--model default] [--requests 8] [--prompt 512] [--answer 64]

One context and one generation worker. Every round sends all requests at once and waits for all answers. Without the
gate the first of them decode in a small batch while the context worker still computes the others' prompts, so that the
rate is one of waiting too; with it nothing is decoded before every cache has arrived. The first round of each cluster
warms it up and is not counted.

    decoding     all tokens but the first ones, over the time from the first of them to the last
    wire         bytes of all caches over the sum of what their writes took
    hand-off     the same bytes over the sum of what the requests waited for their caches
    wall clock   the same bytes over the time from sending the requests until each has a decoded token: prompts and all
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from report import Row, argument_parser, below, figure, show
from rich.console import Console

from isthmus_client import Client
from isthmus_client.local import prepare_cluster
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster
from isthmus_client.timeline import Handoff

VOCAB = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """When its tokens came, and how its cache did."""

    times: tuple[float, ...]
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Round:
    """One round; `began`: when the first request was sent."""

    began: float
    requests: tuple[Request, ...]

    @property
    def early(self) -> int:
        """Tokens that were decoded before the last prompt was computed."""
        computed = max(one.times[0] for one in self.requests)
        return sum(moment < computed for one in self.requests for moment in one.times[1:])

    @property
    def decoded_per_s(self) -> float:
        """See "decoding" above."""
        later = [moment for one in self.requests for moment in one.times[1:]]
        return (len(later) - 1) / (max(later) - min(later))

    def mib_per_s(self, what: str) -> float:
        """`wire`, `handoff` or `wall`: see above."""
        moved = [one.handoff for one in self.requests]
        seconds = {
            "wire": sum(one.wire_s or 0.0 for one in moved),
            "handoff": sum(one.total_s or 0.0 for one in moved),
            "wall": max(one.times[1] for one in self.requests) - self.began,
        }[what]
        return sum(one.bytes for one in moved) / 2**20 / seconds


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="default", help="default, or a folder")
    parser.add_argument("--requests", type=int, default=8, help="of a round, and caches that the gate waits for")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, at least 2")
    parser.add_argument("--rounds", type=int, default=5, help="that are counted, of each cluster")
    arguments = parser.parse_args()
    if arguments.answer < 2 or arguments.requests < 1:
        parser.error("--answer: at least 2; --requests: at least 1")
    if arguments.quick:
        arguments.rounds, arguments.requests, arguments.prompt, arguments.answer = 1, 4, 256, 24
    return arguments


async def ask(client: Client, prompt: list[int], answer: int) -> Request:
    """One request. Raises RuntimeError when it was not handed off: nothing could be measured then."""
    times: list[float] = []
    handoff: Handoff | None = None
    async for part in client.generate(prompt, max_tokens=answer, ignore_eos=True, temperature=0.0):
        times += [time.perf_counter()] * len(part.token_ids)
        if part.end is not None:
            handoff = part.end.timeline.handoff
    if handoff is None:
        raise RuntimeError("a request was not handed off: is its prompt too short for that?")
    return Request(tuple(times), handoff)


async def play(client: Client, arguments: argparse.Namespace, seed: int) -> Round:
    """All requests at once."""
    draw, began = random.Random(seed), time.perf_counter()
    prompts = [[draw.randrange(4, VOCAB) for _ in range(arguments.prompt)] for _ in range(arguments.requests)]
    return Round(began, tuple(await asyncio.gather(*(ask(client, one, arguments.answer) for one in prompts))))


async def prepare(arguments: argparse.Namespace, folder: Path, gate: int) -> LocalCluster:
    """A pair that has not been started. Its context worker computes one prompt in a step."""
    settings = folder / f"settings-{gate}.yaml"
    engine = {"max_running": max(16, arguments.requests), "max_batch_tokens": arguments.prompt}
    engine |= {"prefix_caching": False, "num_threads": 1}
    settings.write_text(json.dumps({"engine": engine, "telemetry": {"sample_ratio": 0.0}}))
    return await prepare_cluster(
        context=1,
        generation=1,
        unsplit=0,
        engine="torch",
        model=arguments.model,
        config=settings,
        log_dir=None,
        ports=(0, 0, 0),
        report=Console(stderr=True).print,
        own={"generation": [f"transfer.fill_gate={gate}"]},
    )


async def measure(arguments: argparse.Namespace, gated: LocalCluster, open_: LocalCluster) -> list[tuple[Round, Round]]:
    """Rounds of both, in turn."""
    rounds: list[tuple[Round, Round]] = []

    async def play_all(_: LocalCluster, stopping: asyncio.Event) -> None:
        async with Client(gated.grpc_endpoint) as one, Client(open_.grpc_endpoint) as other:
            for seed in range(arguments.rounds + 1):
                # Whichever rests has been idle before its next round: then its gate closes again.
                rounds.append((await play(one, arguments, seed), await play(other, arguments, seed)))

    async def second(_: LocalCluster, stopping: asyncio.Event) -> None:
        await run_cluster(open_, play_all, start_timeout_s=300)

    await run_cluster(gated, second, start_timeout_s=300)
    return rounds[1:]


def rows_of(gated: list[Round], open_: list[Round]) -> list[Row]:
    """The figures: medians over rounds."""

    def rate(rounds: list[Round]) -> float:
        return median(one.decoded_per_s for one in rounds)

    early = max(one.early for one in gated)
    rows = [
        below("tokens decoded before the last prompt was computed, with the gate", early, "tokens", 1),
        figure("the same without it, median", median(one.early for one in open_), "tokens"),
        figure("decoding, a full batch from the first token on", rate(gated), "tok/s"),
        figure("the same without the gate, waiting for caches too", rate(open_), "tok/s"),
    ]
    for name, what in (("on the wire", "wire"), ("as requests wait for it", "handoff"), ("by the wall clock", "wall")):
        for kind, rounds in (("with the gate", gated), ("without", open_)):
            rows.append(figure(f"bandwidth {name}, {kind}", median(one.mib_per_s(what) for one in rounds), "MiB/s"))
    return rows


async def main() -> None:
    """Both clusters, in turn."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        clusters = [await prepare(arguments, Path(folder), gate) for gate in (arguments.requests, 0)]
        rounds = await measure(arguments, *clusters)
    title = (
        f"{arguments.requests} requests at once, {arguments.prompt} + {arguments.answer} tokens; "
        f"a round to warm up, {arguments.rounds} counted"
    )
    gated, open_ = ([both[which] for both in rounds] for which in (0, 1))
    show(title, rows_of(gated, open_), arguments.json)


if __name__ == "__main__":
    asyncio.run(main())
