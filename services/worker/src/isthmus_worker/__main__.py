"""`python -m isthmus_worker --config FILE [--set section.key=value]...`: one worker instance.

Exit codes: 0 stopped as asked, 2 wrong settings, 3 could not start, 4 lost its engine process or its membership.
"""

from __future__ import annotations

import asyncio

from isthmus_core.service import ServiceContext, run_service
from isthmus_worker.hub import build_hub


async def main(context: ServiceContext) -> int:
    """Run a worker to its end."""
    hub = build_hub(context.config)
    starting = asyncio.create_task(hub.start())
    stop = asyncio.create_task(context.stopping.wait())
    try:
        await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        starting.result()
        return await hub.run(context.stopping)
    finally:
        stop.cancel()
        await hub.close()


if __name__ == "__main__":
    run_service("isthmus-worker", "One Isthmus worker instance: hub and engine.", main)
