"""The `isthmus` command. Exit codes: 0 done, 1 failed, 2 wrong options or settings, 3 could not start."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Coroutine
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.message import Message as ProtoMessage
from rich.console import Console, Group

from isthmus_client.client import Client, get_cluster
from isthmus_client.demo import run_demo
from isthmus_client.generation import Message
from isthmus_client.local import prepare_cluster
from isthmus_client.runs import stop_runs
from isthmus_client.session import run_cluster
from isthmus_client.show import cluster_json, message_json, render_cluster
from isthmus_client.supervisor import ChildFailed, LocalCluster
from isthmus_client.timeline import render_timeline
from isthmus_client.transfer import (
    list_sessions,
    plan_pair,
    probe_pair,
    render_plan,
    render_probe,
    render_sessions,
)
from isthmus_core.errors import ConfigError, IsthmusError, StartError

GRPC_PORT, HTTP_PORT, COORDINATOR_PORT = 50051, 8000, 50050
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Isthmus: serves a language model with prefill and decode on separate workers.",
)
console = Console()


@app.command()
def up(
    context: Annotated[int, typer.Option(help="context (prefill) instances")] = 1,
    generation: Annotated[int, typer.Option(help="generation (decode) instances")] = 1,
    unsplit: Annotated[int, typer.Option(help="instances that do both")] = 0,
    model: Annotated[str | None, typer.Option(help="default, a folder, or ORG/NAME")] = None,
    engine: Annotated[str | None, typer.Option(help="torch or mock; default: the settings file, else torch")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML settings for every process")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="where logs go; default: a folder per run")] = None,
    http_port: Annotated[int, typer.Option(help="OpenAI HTTP API; 0 = any free port")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(help="gRPC API; 0 = any free port")] = GRPC_PORT,
    coordinator_port: Annotated[int, typer.Option(help="coordinator; 0 = any free port")] = COORDINATOR_PORT,
    start_timeout: Annotated[float, typer.Option(help="give up when not ready after so many seconds")] = 180.0,
) -> None:
    """Run a cluster on this machine until Ctrl-C."""

    async def main() -> None:
        cluster = await prepare_cluster(
            context=context,
            generation=generation,
            unsplit=unsplit,
            engine=engine,
            model=model,
            config=config,
            log_dir=log_dir,
            ports=(grpc_port, http_port, coordinator_port),
            report=_say,
        )
        _say(f"starting {len(cluster.specs)} processes (logs: {cluster.run.logs})")
        await run_cluster(cluster, _serve, start_timeout_s=start_timeout)
        _say("stopped")

    _run(main())


async def _serve(cluster: LocalCluster, stopping: asyncio.Event) -> None:
    async with Client(cluster.grpc_endpoint) as client:
        model = (await client.list_models())[0].name
    for line in endpoint_lines(cluster.grpc_endpoint, cluster.http_endpoint, cluster.coordinator_endpoint, model):
        _say(line)
    await stopping.wait()
    _say("stopping (Ctrl-C again kills)")


def endpoint_lines(grpc: str, http: str, coordinator: str, model: str) -> list[str]:
    """What `up` prints when it is ready: endpoints, one curl line, one grpcurl line. Both work when pasted."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32})
    message = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 16})
    return [
        f"ready: {model}",
        f"  gRPC         {grpc}",
        f"  OpenAI HTTP  {http}/v1",
        f"  coordinator  {coordinator}",
        "",
        f"curl {http}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        f"grpcurl -plaintext -d {shlex.quote(message)} {grpc} isthmus.v1.InferenceService/Generate",
        "",
        "Ctrl-C stops everything.",
    ]


@app.command()
def down(timeout: Annotated[float, typer.Option(help="seconds to wait for the end")] = 60.0) -> None:
    """Stop every cluster that `up` started on this machine for this user."""

    async def main() -> None:
        stopped = await asyncio.to_thread(stop_runs, timeout)
        _say(f"stopped {len(stopped)} cluster(s)" if stopped else "no cluster is running")

    _run(main())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to say to the model")],
    chat: Annotated[bool, typer.Option("--chat/--raw", help="through the chat template, or as plain text")] = True,
    model: Annotated[str, typer.Option(help="may be left out when one model is served")] = "",
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy; default: the model's, else 1")] = None,
    top_p: Annotated[float | None, typer.Option(help="share of the likeliest tokens; default: the model's")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same answer")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="end the answer at this text; may be repeated")] = None,
    endpoint: Annotated[str, typer.Option(help="host:port of the router")] = f"127.0.0.1:{GRPC_PORT}",
    timeline: Annotated[bool, typer.Option("--timeline", help="print where the time went")] = False,
) -> None:
    """Ask a running cluster and print the answer as it comes."""

    async def main() -> None:
        async with Client(endpoint) as client:
            asked = [Message("user", prompt)] if chat else prompt
            parts = client.generate(
                asked,
                model=model,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                stop=stop or (),
            )
            async for part in parts:
                print(part.text, end="", flush=True)
                if part.end is not None:
                    print()
                    if timeline:
                        console.print(render_timeline(part.end.timeline))

    _run(main())


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="what to ask")] = "What is the capital of France?",
    model: Annotated[str, typer.Option(help="default, a folder, or ORG/NAME")] = "default",
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 64,
) -> None:
    """Start a split cluster, ask a question, show where the time went, stop."""
    _run(run_demo(console, question=question, model=model, max_tokens=max_tokens))


@app.command()
def cluster(
    coordinator: Annotated[str, typer.Option(help="host:port")] = f"127.0.0.1:{COORDINATOR_PORT}",
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show the instances, which pairs work (and why others do not), and what is served."""

    async def main() -> None:
        state = await get_cluster(coordinator)
        if as_json:
            print(json.dumps(cluster_json(state), indent=2))
        else:
            console.print(render_cluster(state))

    _run(main())


@app.command()
def sessions(
    worker: Annotated[str, typer.Argument(help="host:port of a worker, see `isthmus cluster`")],
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show who holds which pages of a worker, and what its streams to other workers have agreed on."""
    _ask(list_sessions(worker), render_sessions, as_json=as_json)


@app.command()
def probe(
    context: Annotated[str, typer.Argument(help="host:port of the context worker, which writes")],
    generation: Annotated[str, typer.Option(help="name of the generation worker; needed when there are several")] = "",
    nbytes: Annotated[int, typer.Option("--bytes", min=0, help="size of the large write; 0 = what is possible")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Measure the way of KV caches between two workers with real bytes, and name it."""
    _ask(probe_pair(context, generation, nbytes), render_probe, as_json=as_json)


@app.command()
def plan(
    worker: Annotated[str, typer.Argument(help="host:port of a worker")],
    peer: Annotated[str, typer.Argument(help="host:port of the worker at the other end")],
    tokens: Annotated[int, typer.Option(min=1, help="length of the prompt")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show what a hand-off between two workers would move, or every reason why they can not work together."""
    _ask(plan_pair(worker, peer, tokens), render_plan, as_json=as_json)


M = TypeVar("M", bound=ProtoMessage)


def _ask(question: Coroutine[Any, Any, M], render: Callable[[M], Group], *, as_json: bool) -> None:
    async def main() -> None:
        answer = await question
        if as_json:
            print(json.dumps(message_json(answer), indent=2))
        else:
            console.print(render(answer))

    _run(main())


@app.command()
def version() -> None:
    """Print the version."""
    print(f"isthmus {package_version('isthmus-client')}")


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command; every foreseen failure is one readable message and an exit code."""
    try:
        asyncio.run(work)
    except (ConfigError, StartError, ChildFailed) as error:
        _fail(str(error), error.exit_code)
    except IsthmusError as error:
        _fail(f"{error.code.name}: {error.message}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    sys.stdout.flush()
    print(f"isthmus: {message}", file=sys.stderr)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the command."""
    app()
