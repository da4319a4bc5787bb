"""`isthmus top`."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.live import Live

from isthmus_client.commands.shared import COORDINATOR, console, run, show_json, tls
from isthmus_client.live import Look, look, render_top
from isthmus_client.show import message_json


def top(
    coordinator: Annotated[str, typer.Option(help="host:port of the coordinator")] = COORDINATOR,
    interval: Annotated[float, typer.Option(min=0.2, help="seconds between two looks")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="end after so many looks; 0 = at Ctrl-C")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: one line for each look")] = False,
) -> None:
    """Watch the cluster: instances, KV use, requests and hand-offs that are open."""

    async def main() -> None:
        before: Look | None = None
        done = 0
        with nullcontext() if as_json else Live(console=console, auto_refresh=False, screen=False) as screen:
            while True:
                now = await look(coordinator, tls())
                if screen is None:
                    show_json({"cluster": message_json(now.cluster), "sessions": _sessions(now)}, lines=True)
                else:
                    screen.update(render_top(before, now), refresh=True)
                before, done = now, done + 1
                if count and done >= count:
                    return
                await asyncio.sleep(interval)

    run(main())


def _sessions(now: Look) -> dict[str, object]:
    return {name: message_json(answer) for name, answer in now.sessions.items()}
