"""Getting the model's folder. The worker package knows how; it is asked in its own process (it may load torch)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from isthmus_core.errors import ConfigError, StartError


async def fetch_model(model: str) -> Path:
    """Folder of `model` ("default", a folder, or ORG/NAME), downloaded when it is not there. Progress goes to stderr.

    Raises ConfigError when the model is not usable, StartError when it can not be had.
    """
    command = [sys.executable, "-m", "isthmus_worker.fetch_model", "--model", model, "--print-path"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode != 0:
        kind = ConfigError if process.returncode == 2 else StartError
        raise kind(f"--model {model}: not available (see above)")
    lines = output.decode().split("\n")
    return Path(next(line for line in reversed(lines) if line.strip()).strip())
