"""Talking to a model: generate, chat."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from isthmus_client.commands.shared import ROUTER, client_of, console, run, show_json
from isthmus_client.generation import Answer, Message, Part
from isthmus_client.timeline import render_timeline

Model = Annotated[str, typer.Option(help="may be left out when one model is served")]
Endpoint = Annotated[str, typer.Option(help="host:port of the router")]
MostTokens = Annotated[int, typer.Option(help="most tokens to generate")]
Temperature = Annotated[float | None, typer.Option(help="0 = greedy; default: the model's, else 1")]
TopP = Annotated[float | None, typer.Option(help="share of the likeliest tokens; default: the model's")]
Seed = Annotated[int | None, typer.Option(help="the same seed gives the same answer")]


def generate(
    prompt: Annotated[str, typer.Argument(help="what to say to the model")],
    chat: Annotated[bool, typer.Option("--chat/--raw", help="through the chat template, or as plain text")] = True,
    model: Model = "",
    max_tokens: MostTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="end the answer at this text; may be repeated")] = None,
    endpoint: Endpoint = ROUTER,
    timeline: Annotated[bool, typer.Option("--timeline", help="print where the time went")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: the whole answer at its end")] = False,
) -> None:
    """Ask a running cluster and print the answer as it comes."""
    asked = [Message("user", prompt)] if chat else prompt
    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    options |= {"seed": seed, "stop": stop or ()}

    async def main() -> None:
        async with client_of(endpoint) as client:
            if as_json:
                show_json(_plain(await client.answer(asked, **options)))
                return
            async for part in client.generate(asked, **options):
                _print_part(part, timeline=timeline)

    run(main())


def _print_part(part: Part, *, timeline: bool) -> None:
    print(part.text, end="", flush=True)
    if part.end is None:
        return
    print()
    if timeline:
        console.print(render_timeline(part.end.timeline))
        console.print(f"request {part.request_id}: isthmus trace {part.request_id}", highlight=False)


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "request_id": answer.request_id,
        "reason": answer.reason,
        "timeline": asdict(answer.end.timeline),
    }


def chat(
    system: Annotated[str, typer.Option(help="what the model is told first")] = "",
    model: Model = "",
    max_tokens: MostTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    endpoint: Endpoint = ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="for programs: each answer whole, on a line")] = False,
) -> None:
    """Talk to a model, turn by turn, until an empty line or Ctrl-D. `/new` forgets what was said."""
    said = [Message("system", system)] if system else []
    options: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    options["seed"] = seed

    async def main() -> None:
        turns = list(said)
        async with client_of(endpoint) as client:
            while (line := _read_line()) is not None:
                if line == "/new":
                    turns = list(said)
                    continue
                turns.append(Message("user", line))
                if as_json:
                    answer = await client.answer(turns, **options)
                    show_json(_plain(answer), lines=True)
                    text = answer.text
                else:
                    text = ""
                    async for part in client.generate(turns, **options):
                        print(part.text, end="", flush=True)
                        text += part.text
                    print()
                turns.append(Message("assistant", text))

    run(main())


def _read_line() -> str | None:
    """A turn, or None at the end. Nothing else runs while we wait, so blocking is fine."""
    if sys.stdin.isatty():
        console.print("[bold]> [/]", end="")
    line = sys.stdin.readline()
    return line.strip() or None
