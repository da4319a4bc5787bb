"""A plan from two files, without a cluster. The planner is a program of its own: this package needs no kvtransfer."""

from __future__ import annotations

import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

from google.protobuf.json_format import Parse
from isthmus.v1 import transfer_tools_pb2

from isthmus_core.errors import ConfigError


async def plan_files(source: Path, target: Path, tokens: int) -> transfer_tools_pb2.PlanTransferResponse:
    """What a hand-off between the two described instances would be. Raises ConfigError."""
    if find_spec("kvtransfer") is None:
        raise ConfigError("a plan from files needs the planner here: pip install kvtransfer")
    command = ["-m", "kvtransfer.plan_files", str(source), str(target), "--tokens", str(tokens)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise ConfigError(err.decode(errors="replace").strip())
    return Parse(out, transfer_tools_pb2.PlanTransferResponse())
