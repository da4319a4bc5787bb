"""`python -m isthmus_worker --config FILE [--set section.key=value]...`: one worker instance.

Exit codes: 0 stopped as asked, 2 wrong settings, 3 could not start, 4 lost its engine process or its membership.
"""

from __future__ import annotations

import asyncio
import sys

from isthmus_core.service import ServiceContext, run_service
from isthmus_worker.hub import SERVICE, build_hub

# The engine process ended although nobody asked it to, or the cluster no longer wants this instance.
EXIT_LOST = 4


async def main(context: ServiceContext) -> int:
    """Run a worker to its end."""
    hub = build_hub(context.config)
    starting = asyncio.create_task(hub.start())
    stop = asyncio.create_task(context.stopping.wait())
    lost = None
    try:
        await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            lost = await hub.run(context.stopping)
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
    finally:
        stop.cancel()
        await hub.close()
    if lost is None:
        return 0
    # After everything else: whoever started this process reports its last line.
    print(f"{SERVICE}: {lost}", file=sys.stderr)
    return EXIT_LOST


if __name__ == "__main__":
    run_service(SERVICE, "One Isthmus worker instance: hub and engine.", main)
