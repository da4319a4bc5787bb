"""The `isthmus` command as a process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path


async def isthmus(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and everything printed."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("isthmus")),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=None if environment is None else dict(environment),
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()
