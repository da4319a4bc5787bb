"""Looking at a running cluster: cluster, sessions, probe, plan, trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from isthmus_client.client import get_cluster
from isthmus_client.commands.shared import COORDINATOR, AsJson, ask, console, fail, run, show_json, tls
from isthmus_client.offline_plan import plan_files
from isthmus_client.probing import probe_cluster, render_matrix
from isthmus_client.show import cluster_json, message_json, render_cluster
from isthmus_client.story import render_story, request_story
from isthmus_client.transfer import list_sessions, plan_pair, probe_pair, render_plan, render_probe, render_sessions

Coordinator = Annotated[str, typer.Option(help="host:port of the coordinator")]


def cluster(coordinator: Coordinator = COORDINATOR, as_json: AsJson = False) -> None:
    """Show the instances, which pairs work (and why others do not), and what is served."""

    async def main() -> None:
        state = await get_cluster(coordinator, tls=tls())
        if as_json:
            show_json(cluster_json(state))
        else:
            console.print(render_cluster(state))

    run(main())


def sessions(
    worker: Annotated[str, typer.Argument(help="host:port of a worker, see `isthmus cluster`")], as_json: AsJson = False
) -> None:
    """Show who holds which pages of a worker, and what its streams to other workers have agreed on."""
    ask(list_sessions(worker, tls=tls()), render_sessions, as_json=as_json)


def probe(
    context: Annotated[
        str, typer.Argument(help="host:port of the context worker, which writes; left out: every ready pair")
    ] = "",
    generation: Annotated[str, typer.Option(help="name of the generation worker; needed when there are several")] = "",
    nbytes: Annotated[int, typer.Option("--bytes", min=0, help="size of the large write; 0 = what is possible")] = 0,
    coordinator: Coordinator = COORDINATOR,
    as_json: AsJson = False,
) -> None:
    """Measure the way of KV caches between workers with real bytes, and name it: one pair, or a matrix of all."""
    if context:
        ask(probe_pair(context, generation, nbytes, tls=tls()), render_probe, as_json=as_json)
        return

    async def main() -> None:
        answers = await probe_cluster(coordinator, nbytes, tls())
        if as_json:
            show_json([message_json(one) for one in answers])
        else:
            console.print(render_matrix(answers))

    run(main())


def plan(
    source: Annotated[str, typer.Option("--from", help="host:port of a worker, or a file of its GetInstanceInfo")],
    target: Annotated[str, typer.Option("--to", help="the worker at the other end, likewise")],
    tokens: Annotated[int, typer.Option(min=1, help="length of the prompt")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Show what a hand-off between two workers would move, or every reason why they can not work together.

    Without a cluster: give two files, as `grpcurl … isthmus.v1.KvTransferService/GetInstanceInfo` prints them.
    """
    files = [Path(one) for one in (source, target) if Path(one).is_file()]
    if len(files) == 1:
        fail(f"--from {source} --to {target}: one is a file and one is not; give two of a kind", 2)
    if files:
        ask(plan_files(files[0], files[1], tokens), render_plan, as_json=as_json)
    else:
        ask(plan_pair(source, target, tokens, tls=tls()), render_plan, as_json=as_json)


def trace(
    request_id: Annotated[int, typer.Argument(help="id of the request, as every answer and log line names it")],
    coordinator: Coordinator = COORDINATOR,
    as_json: AsJson = False,
) -> None:
    """Draw the timeline of one recent request from the workers' own record; no trace backend is needed."""

    async def main() -> None:
        legs = await request_story(coordinator, request_id, tls())
        if not legs:
            fail(f"no worker remembers request {request_id}; telemetry.timelines says how many they keep", 1)
        if as_json:
            show_json([message_json(leg) for leg in legs])
        else:
            console.print(render_story(legs, console.width))

    run(main())
