"""Running a service: arguments, event loop, signals, readable start-up errors.

    python -m isthmus_coordinator --config FILE [--set section.key=value]...

Exit codes: 0 stopped as asked, 2 wrong settings, 3 could not start, anything else a crash.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from isthmus_core.config import IsthmusConfig, load_config
from isthmus_core.errors import ConfigError, StartError
from isthmus_core.process import leave


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What a service's main gets: its configuration, the file it came from, and the event that asks it to stop."""

    config: IsthmusConfig
    config_path: Path | None
    overrides: tuple[str, ...]
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


ServiceMain = Callable[[ServiceContext], Awaitable[int | None]]


def parse_arguments(program: str, description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """`--config` and `--set` of every service."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="change one key"
    )
    return parser.parse_args(argv)


async def _supervise(main: ServiceMain, context: ServiceContext) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.stopping.set)
    return await main(context) or 0


def run_service(program: str, description: str, main: ServiceMain, argv: Sequence[str] | None = None) -> None:
    """Run `main` to its end and leave the process with its exit code. SIGTERM and SIGINT set `context.stopping`."""
    arguments = parse_arguments(program, description, argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        context = ServiceContext(config, arguments.config, tuple(arguments.overrides))
        code = uvloop.run(_supervise(main, context))
    except (ConfigError, StartError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        code = error.exit_code
    leave(code)
