"""The `isthmus` command. Exit codes: 0 done, 1 failed, 2 wrong options or settings, 3 could not start."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Coroutine
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from isthmus_client.client import Client, Message, get_cluster
from isthmus_client.demo import run_demo
from isthmus_client.local import prepare_cluster
from isthmus_client.runs import stop_runs
from isthmus_client.session import run_cluster
from isthmus_client.show import cluster_json, render_cluster
from isthmus_client.supervisor import ChildFailed, LocalCluster
from isthmus_client.timeline import render_timeline
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
    endpoint: Annotated[str, typer.Option(help="host:port of the router")] = f"127.0.0.1:{GRPC_PORT}",
    timeline: Annotated[bool, typer.Option("--timeline", help="print where the time went")] = False,
) -> None:
    """Ask a running cluster and print the answer as it comes."""

    async def main() -> None:
        async with Client(endpoint) as client:
            asked = [Message("user", prompt)] if chat else prompt
            async for part in client.generate(asked, model=model, max_tokens=max_tokens):
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
