"""A fleet of mock workers in a process of its own: one JSON command a line on stdin, one answer a line on stdout.

python tests/support/fleet_process.py COORDINATOR SIZE SEED WHOLE
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

from mock_fleet import MockFleet

_LONGEST_ANSWER = 1 << 20


async def obey(fleet: MockFleet, command: dict[str, Any]) -> object:
    """Carry out a command."""
    match command:
        case {"do": "start"}:
            await fleet.start()
            return len(fleet.workers)
        case {"do": "live", "seconds": seconds, "churn": churn, "beat_s": beat_s}:
            replaced, _ = await asyncio.gather(fleet.churn(seconds, churn), fleet.beat(seconds, beat_s))
            return replaced
        case {"do": "tell"}:
            return {
                one.name: [len(one.cached), one.load.running_requests, one.load.used_blocks] for one in fleet.workers
            }
        case {"do": "leave"}:
            await fleet.close()
            return 0
        case _:
            raise ValueError(f"unknown command {command}")


async def main(target: str, size: int, seed: int, whole: int) -> None:
    """Until stdin ends."""
    fleet = MockFleet(target, size, seed, whole)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await obey(fleet, json.loads(line))), flush=True)


class FleetProcess:
    """The other end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def do(self, what: str, **more: Any) -> Any:
        """One command, and its answer. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fleet has ended with {await self._process.wait()} while it was to {what}")
        return json.loads(line)


@asynccontextmanager
async def fleet_process(target: str, size: int, seed: int, whole: int, log: Path) -> AsyncGenerator[FleetProcess, None]:
    """A fleet that has not started yet. Killed at the end."""
    arguments = [str(part) for part in (target, size, seed, whole)]
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, *arguments, stdin=PIPE, stdout=PIPE, stderr=errors, limit=_LONGEST_ANSWER
        )
    try:
        yield FleetProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def coordinator_process(address: str, log: Path, *overrides: str) -> AsyncGenerator[int, None]:
    """A coordinator at `address`; the value is its process id. Killed at the end."""
    settings = (f"coordinator.listen={address}", "coordinator.id_grace_s=0", "logging.level=WARNING", *overrides)
    flags = [flag for setting in settings for flag in ("--set", setting)]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "isthmus_coordinator", *flags, stdin=DEVNULL, stdout=output, stderr=output
        )
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
