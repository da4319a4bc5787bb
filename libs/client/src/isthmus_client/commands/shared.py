"""What every command needs: the terminal, exit codes, the certificates.

Exit codes: 0 done, 1 failed, 2 wrong options or settings, 3 could not start, 4 a check found something,
130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from google.protobuf.message import Message as ProtoMessage
from rich.console import Console, RenderableType

from isthmus_client.client import Client
from isthmus_client.show import message_json
from isthmus_client.supervisor import ChildFailed
from isthmus_core.config import TlsConfig
from isthmus_core.errors import ConfigError, IsthmusError, StartError

GRPC_PORT, HTTP_PORT, COORDINATOR_PORT = 50051, 8000, 50050
ROUTER = f"127.0.0.1:{GRPC_PORT}"
COORDINATOR = f"127.0.0.1:{COORDINATOR_PORT}"
FOUND_SOMETHING = 4

AsJson = Annotated[bool, typer.Option("--json", help="for programs")]
console = Console()
M = TypeVar("M", bound=ProtoMessage)


class Connection:
    """What every call of this process shows, set by the options before the command's name."""

    tls: TlsConfig | None = None
    api_key: str | None = None


def tls() -> TlsConfig | None:
    """Certificates to call with, or None."""
    return Connection.tls


def client_of(endpoint: str) -> Client:
    """A client of the router at host:port that shows what it was told to."""
    return Client(endpoint, tls=Connection.tls, api_key=Connection.api_key)


def say(line: str) -> None:
    """A line, as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_json(value: Any, *, lines: bool = False) -> None:
    """For programs: on stdout, nothing else beside it. `lines`: on one line, for commands that say several things."""
    print(json.dumps(value, indent=None if lines else 2), flush=True)


def tell(value: Any, *lines: str, as_json: bool) -> None:
    """What was done: as `value` for programs, as `lines` for people."""
    if as_json:
        show_json(value)
        return
    for line in lines:
        say(line)


def note(line: str) -> None:
    """For people, beside what programs read."""
    print(line, file=sys.stderr)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command; every foreseen failure is one readable message and an exit code."""
    try:
        asyncio.run(work)
    except (ConfigError, StartError, ChildFailed) as error:
        fail(str(error), error.exit_code)
    except IsthmusError as error:
        fail(f"{error.code.name}: {error.message}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        fail("interrupted", 130)


def fail(message: str, code: int) -> NoReturn:
    """End the command."""
    sys.stdout.flush()
    print(f"isthmus: {message}", file=sys.stderr)
    raise typer.Exit(code)


def ask(question: Coroutine[Any, Any, M], render: Callable[[M], RenderableType], *, as_json: bool) -> None:
    """One question, its answer as JSON or drawn."""

    async def main() -> None:
        answer = await question
        if as_json:
            show_json(message_json(answer))
        else:
            console.print(render(answer))

    run(main())
