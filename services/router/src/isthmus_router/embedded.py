"""The coordinator inside a router process (`router.coordinator: embedded`).

Router and coordinator know each other by the wire only, here too: the module is looked up when the setting asks for it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from isthmus_core.config import IsthmusConfig
from isthmus_core.errors import ConfigError
from isthmus_core.process import split_address
from isthmus_core.telemetry import Telemetry

_MODULE = "isthmus_coordinator.service"


def check_installed() -> None:
    """Raises ConfigError when there is no coordinator to run."""
    if importlib.util.find_spec(_MODULE.partition(".")[0]) is None:
        raise ConfigError("router.coordinator = embedded: the package isthmus-coordinator is not installed")


@asynccontextmanager
async def embedded_coordinator(config: IsthmusConfig, telemetry: Telemetry) -> AsyncGenerator[str]:
    """Runs it at `coordinator.listen`; the value is its host:port. Raises ConfigError or StartError."""
    check_installed()
    service: Any = importlib.import_module(_MODULE)
    stopping = asyncio.Event()
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(service.serve(config.coordinator, config.tls, telemetry, stopping, started))
    try:
        await asyncio.wait((running, started), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await running
        host, _ = split_address(config.coordinator.listen, "coordinator.listen")
        yield f"[{host}]:{started.result()}" if ":" in host else f"{host}:{started.result()}"
    finally:
        stopping.set()
        await running
