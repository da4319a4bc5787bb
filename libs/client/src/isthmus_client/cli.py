"""The `isthmus` command: what runs a cluster on this machine, and all the others put together.

Exit codes are those of `isthmus_client.commands.shared`.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import asdict
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isthmus_client.client import get_cluster
from isthmus_client.commands import inspect, keys, load, operate, settings, talk, watch
from isthmus_client.commands.shared import (
    COORDINATOR_PORT,
    GRPC_PORT,
    HTTP_PORT,
    AsJson,
    Connection,
    console,
    note,
    run,
    say,
    show_json,
    tell,
)
from isthmus_client.demo import run_demo
from isthmus_client.local import prepare_cluster
from isthmus_client.runs import stop_runs
from isthmus_client.session import run_cluster
from isthmus_client.supervisor import LocalCluster
from isthmus_core.config import TlsConfig

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Isthmus: serves a language model with prefill and decode on separate workers.",
)


_OWN = "section.key=value of the {} instances only, for example parallel.tensor_parallel_size=2; may be repeated"


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
    context_set: Annotated[list[str] | None, typer.Option(help=_OWN.format("context"))] = None,
    generation_set: Annotated[list[str] | None, typer.Option(help=_OWN.format("generation"))] = None,
    unsplit_set: Annotated[list[str] | None, typer.Option(help=_OWN.format("unsplit"))] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: the endpoints, when it is ready")] = False,
) -> None:
    """Run a cluster on this machine until Ctrl-C."""

    tell_people = note if as_json else say

    async def serve(cluster: LocalCluster, stopping: asyncio.Event) -> None:
        # The coordinator knows it too, and asks for no API key.
        served = (await get_cluster(cluster.coordinator_endpoint, tls=cluster.tls)).models[0].name
        places = (cluster.grpc_endpoint, cluster.http_endpoint, cluster.coordinator_endpoint)
        if as_json:
            show_json(dict(zip(("grpc", "http", "coordinator", "model"), (*places, served), strict=True)), lines=True)
        else:
            for line in endpoint_lines(*places, served):
                say(line)
        await stopping.wait()
        tell_people("stopping (Ctrl-C again kills)")

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
            report=tell_people,
            own={"context": context_set or [], "generation": generation_set or [], "unsplit": unsplit_set or []},
        )
        tell_people(f"starting {len(cluster.specs)} processes (logs: {cluster.run.logs})")
        await run_cluster(cluster, serve, start_timeout_s=start_timeout)
        tell_people("stopped")

    run(main())


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
def down(
    timeout: Annotated[float, typer.Option(help="seconds to wait for the end")] = 60.0, as_json: AsJson = False
) -> None:
    """Stop every cluster that `up` started on this machine for this user."""

    async def main() -> None:
        stopped = await asyncio.to_thread(stop_runs, timeout)
        line = f"stopped {len(stopped)} cluster(s)" if stopped else "no cluster is running"
        tell({"stopped": stopped}, line, as_json=as_json)

    run(main())


@app.command()
def demo(
    question: Annotated[str, typer.Argument(help="what to ask")] = "What is the capital of France?",
    model: Annotated[str, typer.Option(help="default, a folder, or ORG/NAME")] = "default",
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate")] = 64,
    as_json: AsJson = False,
) -> None:
    """Start a split cluster, ask a question, show where the time went, stop."""

    async def main() -> None:
        shown = Console(stderr=True) if as_json else console
        parts = await run_demo(shown, question=question, model=model, max_tokens=max_tokens)
        if as_json:
            times = [asdict(part.end.timeline) for part in parts if part.end is not None]
            show_json({"text": "".join(part.text for part in parts), "timeline": times[0]})

    run(main())


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version."""
    known = package_version("isthmus-client")
    tell({"version": known}, f"isthmus {known}", as_json=as_json)


for _command in (
    talk.generate,
    talk.chat,
    inspect.cluster,
    watch.top,
    inspect.sessions,
    inspect.plan,
    inspect.probe,
    inspect.trace,
    operate.drain,
    operate.role,
    load.bench,
    settings.doctor,
    settings.certs,
):
    app.command()(_command)
app.add_typer(settings.config, name="config")
app.add_typer(keys.keys, name="keys")


@app.callback()
def certificates(
    tls_ca: Annotated[Path | None, typer.Option(envvar="ISTHMUS_TLS_CA", help="PEM: who is believed")] = None,
    tls_cert: Annotated[Path | None, typer.Option(envvar="ISTHMUS_TLS_CERT", help="PEM: who we are")] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="ISTHMUS_TLS_KEY", help="PEM: its private key")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ISTHMUS_API_KEY", help="for routers that ask for one")] = None,
) -> None:
    """Isthmus: serves a language model with prefill and decode on separate workers."""
    given = (tls_ca, tls_cert, tls_key)
    if any(given) and not all(given):
        raise typer.BadParameter("--tls-ca, --tls-cert and --tls-key: all three or none")
    Connection.api_key = api_key or None
    Connection.tls = TlsConfig(ca=tls_ca, cert=tls_cert, key=tls_key) if all(given) else None


def main() -> None:
    """Entry point of the command."""
    app()
