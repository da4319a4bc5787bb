"""What of a hand-off is left after the last forward pass of a prompt, when its chunks were sent while it was computed.

    PYTHONPATH=tests/support python benchmarks/chunked_prefill.py [--quick] [--json FILE] [--device cuda]

A generation worker and two context workers, one of them with `transfer.layer_wise`, real processes over NIXL. A random
model of the shape of Llama 8B (`--quick`: a small one), bfloat16. The workers' own record says when the last chunk of a
prompt was computed on the one instance, and when the other one, which has the cache and the first token then, could
decode:

    unpipelined   context_first: the cache is asked for when the prompt is computed
    by chunks     generation_first: what a step has computed is sent while the next one runs
    by layers     the same, and the last chunk layer by layer while it is computed
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.v1 import timeline_pb2
from random_llama import LLAMA_8B, SMALL, random_llama
from report import Row, argument_parser, below, figure, write

from parity_fleet import Fleet, Instance, Shape, run_at_once, run_split
from parity_oracle import Case

if TYPE_CHECKING:
    import argparse

NEW_TOKENS = 4
CHUNK, RECEIVE = timeline_pb2.TIMELINE_KIND_PREFILL_CHUNK, timeline_pb2.TIMELINE_KIND_RECEIVE
DECODE, TRANSFER = timeline_pb2.TIMELINE_KIND_DECODE, timeline_pb2.TIMELINE_KIND_TRANSFER
# Share of an unpipelined hand-off, and seconds: the larger one may be left.
AIMS = {"by chunks": 0.10, "by layers": 0.05}
LEAST_S = 2e-3


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds of one hand-off: the whole prompt, the cache on its way, and from the last forward pass until the cache
    was there and until its request could decode. Negative: before the step was over, sampling included. Of the last
    write, from the last forward pass too: taken by the rank and told by it, and how long it planned and posted."""

    prefill: float
    receive: float
    there: float
    ready: float
    taken: float
    told: float
    plan: float
    post: float


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="engine.device of the context workers")
    parser.add_argument("--generation-device", help="engine.device of the generation worker; default: the same")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a prompt")
    parser.add_argument("--chunk", type=int, default=2048, help="engine.max_batch_tokens")
    parser.add_argument("--block", type=int, default=16, help="engine.tokens_per_block of the context workers")
    parser.add_argument("--generation-block", type=int, help="of the generation worker; default: the same")
    parser.add_argument("--attention", default="sdpa", help="engine.attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which no round is begun")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.chunk, arguments.rounds = min(arguments.tokens, 2048), 256, 3
    return arguments


def shape_of(model: Path, arguments: argparse.Namespace, device: str, block: int, *more: str) -> Shape:
    """A worker with room for two prompts."""
    blocks = 2 * (arguments.tokens + NEW_TOKENS) // block + 8
    return Shape(
        model,
        settings=(
            f"engine.device={device}",
            f"engine.attention={arguments.attention}",
            f"engine.max_batch_tokens={arguments.chunk}",
            f"engine.num_blocks={blocks}",
            f"engine.tokens_per_block={block}",
            "model.dtype=bfloat16",
            "worker.start_timeout_s=150",
            "transfer.max_held_share=1",
            *more,
        ),
    )


async def seen(context: Instance, generation: Instance) -> Seen:
    """Of the latest legs of both."""
    legs = [
        (await one.process.stub.GetTimeline(timeline_pb2.GetTimelineRequest(limit=1))).legs[0]
        for one in (context, generation)
    ]
    chunks = [one for one in legs[0].entries if one.kind == CHUNK]
    (receive,) = (one for one in legs[1].entries if one.kind == RECEIVE)
    (decode,) = (one for one in legs[1].entries if one.kind == DECODE)
    begun = min(one.begin_unix_ns for one in chunks)
    computed = max(one.begin_unix_ns + one.duration_ns for one in chunks)
    there = receive.begin_unix_ns + receive.duration_ns
    last = max((one for one in legs[0].entries if one.kind == TRANSFER), key=lambda one: one.begin_unix_ns)
    spans = (computed - begun, receive.duration_ns, there - computed, decode.begin_unix_ns - computed)
    write = (last.begin_unix_ns - computed, last.begin_unix_ns + last.duration_ns - computed)
    return Seen(*(one / 1e9 for one in (*spans, *write, last.parts.plan_ns, last.parts.post_ns)))


async def measure(fleet: Fleet, model: Path, arguments: argparse.Namespace, until: float) -> dict[str, list[Seen]]:
    """All rounds, the ways in turn; the first round warms up and is not counted."""
    second = arguments.generation_device or arguments.device, arguments.generation_block or arguments.block
    generation = shape_of(model, arguments, *second)
    contexts = [
        shape_of(model, arguments, arguments.device, arguments.block, *more)
        for more in ((), ("transfer.layer_wise=true",))
    ]
    await fleet.start((generation, "generation"), *((one, "context") for one in contexts))
    plain, layered = [await fleet.pair(one, generation) for one in contexts]
    ways: dict[str, tuple[tuple[Instance, Instance], Callable[..., Awaitable[object]]]] = {
        "unpipelined": (plain, run_split),
        "by chunks": (plain, run_at_once),
        "by layers": (layered, run_at_once),
    }
    draw, found = random.Random(1), {name: list[Seen]() for name in ways}
    for turn in range(arguments.rounds + 1):
        if turn > 1 and time.monotonic() > until:
            print("deadline", flush=True)
            break
        for name, (pair, run) in ways.items():
            prompt = tuple(draw.randrange(4, SMALL["vocab_size"]) for _ in range(arguments.tokens))
            await run(*pair, Case(prompt, seeded=False, new_tokens=NEW_TOKENS), fleet.number())
            for one in pair:
                await one.process.idle()
            if turn:
                found[name].append(await seen(*pair))
                print(f"{name}: {found[name][-1]}", flush=True)
    return found


def rows_of(found: dict[str, list[Seen]], arguments: argparse.Namespace) -> list[Row]:
    """Medians over the rounds."""
    whole = statistics.median(one.receive for one in found["unpipelined"])
    what = f"{arguments.tokens} tokens in chunks of {arguments.chunk}"
    rows = [
        figure(f"{what}: computed", statistics.median(one.prefill for one in found["unpipelined"]) * 1e3, "ms"),
        figure(f"{what}: unpipelined hand-off", whole * 1e3, "ms"),
    ]
    for name, share in AIMS.items():
        there, ready = (statistics.median(getattr(one, key) for one in found[name]) for key in ("there", "ready"))
        rows.append(figure(f"{what}: {name}, the cache is there after", there * 1e3, "ms"))
        rows.append(below(f"{what}: {name}, decode-ready after", ready * 1e3, "ms", max(share * whole, LEAST_S) * 1e3))
    return rows


async def main() -> None:
    """Make the model, start the workers, play, print."""
    arguments = parse_arguments()
    until = time.monotonic() + arguments.deadline
    with tempfile.TemporaryDirectory(prefix="isthmus-chunked-prefill-") as name:
        folder = Path(name)
        model = random_llama(folder / "model", SMALL if arguments.quick else LLAMA_8B, arguments.device)
        async with Fleet(folder, max_ranks=3) as fleet:
            rows = rows_of(await measure(fleet, model, arguments, until), arguments)
    for row in rows:
        print(f"{row.name}: {row.value:.3g} {row.unit} {row.aim} {'' if row.ok is None else row.ok}")
    if arguments.json is not None:
        write(rows, arguments.json)


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)
