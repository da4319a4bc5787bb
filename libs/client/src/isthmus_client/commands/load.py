"""`isthmus bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from isthmus_client.client import Client
from isthmus_client.commands.shared import ROUTER, client_of, console, fail, run, show_json
from isthmus_client.load.measure import Measured, send_all
from isthmus_client.load.page import html_report
from isthmus_client.load.report import render_summary
from isthmus_client.load.saved import Run
from isthmus_client.load.summary import Targets, summarise
from isthmus_client.load.workload import parse_length, plan_workload
from isthmus_core.errors import ConfigError

_PRINTABLE = range(32, 127)


def bench(
    requests: Annotated[int, typer.Option(min=1, help="how many requests")] = 100,
    rate: Annotated[float, typer.Option(min=0, help="requests a second, Poisson arrivals; 0 = all at once")] = 0.0,
    concurrency: Annotated[int, typer.Option(min=0, help="most requests at once; 0 = no limit")] = 0,
    isl: Annotated[str, typer.Option(help="prompt tokens: 512, uniform:A-B, normal:M,D or lognormal:M,S")] = "512",
    osl: Annotated[str, typer.Option(help="output tokens, likewise")] = "64",
    shared_prefix: Annotated[int, typer.Option(min=0, help="tokens that all prompts begin with")] = 0,
    vocabulary: Annotated[str, typer.Option(help="FIRST-LAST token id of random prompts")] = "32-126",
    ttft_slo: Annotated[float | None, typer.Option(help="target for the first token in ms")] = None,
    tpot_slo: Annotated[float | None, typer.Option(help="target for each further token in ms")] = None,
    seed: Annotated[int, typer.Option(help="the same seed asks the same at the same times")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="requests before, not counted")] = 2,
    model: Annotated[str, typer.Option(help="may be left out when one model is served")] = "",
    endpoint: Annotated[str, typer.Option(help="host:port of the router")] = ROUTER,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that a request may take")] = 300.0,
    save: Annotated[Path | None, typer.Option(help="write figures and every request as JSON")] = None,
    compare: Annotated[Path | None, typer.Option(help="show a saved run beside this one, in the report too")] = None,
    report: Annotated[Path | None, typer.Option(help="write a page with plots (HTML)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Send requests at random times and show TTFT, TPOT, throughput and goodput as a client sees them."""
    before = _read(compare) if compare is not None else None

    async def main() -> None:
        asked = {"isl": parse_length(isl, "--isl"), "osl": parse_length(osl, "--osl")}
        total = warmup + requests
        planned = plan_workload(
            requests=total,
            rate=rate,
            prompt=asked["isl"],
            output=asked["osl"],
            vocabulary=_range(vocabulary),
            shared_prefix=shared_prefix,
            seed=seed,
        )
        async with client_of(endpoint) as client:
            measured = await _measure(
                client, planned, total=total, model=model, concurrency=concurrency, timeout=timeout, warmup=warmup
            )
        targets = Targets(_seconds(ttft_slo), _seconds(tpot_slo))
        summary = summarise(measured, targets)
        options = {"requests": requests, "rate": rate, "concurrency": concurrency, "isl": isl, "osl": osl, "seed": seed}
        options |= {"shared_prefix": shared_prefix, "ttft_slo_ms": ttft_slo, "tpot_slo_ms": tpot_slo}
        done = Run(options, summary, measured)
        if save is not None:
            done.write(save)
        if report is not None:
            _write_page(report, html_report("isthmus bench", done, before))
        if as_json:
            show_json(summary)
        else:
            console.print(render_summary(summary, None if before is None else before.summary))
        if summary["failed"]:
            fail(f"{summary['failed']} of {requests} requests failed: {summary['errors']}", 1)

    run(main())


async def _measure(
    client: Client, planned: list[Any], *, total: int, model: str, concurrency: int, timeout: float, warmup: int
) -> list[Measured]:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("requests", total=total)
        measured = await send_all(
            client,
            planned,
            model=model,
            concurrency=concurrency,
            timeout_s=timeout,
            done=lambda _: progress.advance(task),
        )
    return measured[warmup:]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        fail(f"--vocabulary {text}: write FIRST-LAST, for example {_PRINTABLE.start}-{_PRINTABLE.stop - 1}", 2)
    return range(int(first), int(last) + 1)


def _read(path: Path) -> Run:
    try:
        return Run.read(path)
    except ConfigError as error:
        fail(str(error), error.exit_code)


def _write_page(path: Path, page: str) -> None:
    try:
        path.write_text(page)
    except OSError as error:
        fail(f"--report {path}: {error.strerror}", 2)
