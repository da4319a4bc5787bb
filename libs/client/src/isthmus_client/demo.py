"""`isthmus demo`: a real model, prefilled in one process and decoded in another, answers a question."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from isthmus_client.client import Client
from isthmus_client.generation import Message, Part
from isthmus_client.local import prepare_cluster
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster
from isthmus_client.timeline import render_timeline
from isthmus_core.errors import StartError

START_TIMEOUT_S = 120.0


async def run_demo(console: Console, *, question: str, model: str, max_tokens: int) -> list[Part]:
    """Start one context and one generation instance, ask, print the answer and where the time went, stop everything.

    Returns the parts of the answer. Raises ConfigError, StartError, IsthmusError.
    """
    began = time.monotonic()
    parts: list[Part] = []

    def report(line: str) -> None:
        console.print(f"[{time.monotonic() - began:5.1f} s] {line}", markup=False, highlight=False, soft_wrap=True)

    cluster = await prepare_cluster(
        context=1,
        generation=1,
        unsplit=0,
        engine="torch",
        model=model,
        config=None,
        log_dir=None,
        ports=(0, 0, 0),
        report=report,
    )

    async def ask(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        report(f"ready: router {cluster.grpc_endpoint}, one context instance, one generation instance")
        asking = asyncio.create_task(stream_answer(console, cluster.grpc_endpoint, question, max_tokens))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait([asking, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not asking.done():
            asking.cancel()
            raise StartError("interrupted")
        parts.extend(await asking)

    report(f"starting coordinator, router and 2 workers (logs: {cluster.run.logs})")
    await run_cluster(cluster, ask, start_timeout_s=START_TIMEOUT_S)
    report("stopped")
    return parts


async def stream_answer(console: Console, endpoint: str, question: str, max_tokens: int) -> list[Part]:
    """Ask through the router's gRPC API, print the answer as it comes, then the timeline. Returns its parts."""
    parts: list[Part] = []
    console.print(f"\nQ: {question}\nA: ", end="", markup=False, highlight=False)
    async with Client(endpoint) as client:
        async for part in client.generate([Message("user", question)], max_tokens=max_tokens, temperature=0):
            parts.append(part)
            console.print(part.text, end="", markup=False, highlight=False, soft_wrap=True)
            if part.end is not None:
                console.print("\n")
                console.print(render_timeline(part.end.timeline))
                console.print()
    return parts
