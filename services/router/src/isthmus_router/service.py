"""The router: one process that serves, or the parent of several."""

from __future__ import annotations

from isthmus_core.service import ServiceContext


async def main(context: ServiceContext) -> None:
    """Run a router until it is asked to stop. Raises ConfigError or StartError when it can not start."""
    # The parent of a fleet needs no tokenizer: a hundred megabytes less.
    if context.config.router.num_workers > 1:
        from isthmus_router.fleet.parent import run_parent

        await run_parent(context)
    else:
        from isthmus_router.router_process import run_router

        await run_router(context)
