"""vLLM as the engine of a worker.

    hub ── VllmEngine ──┬── frames ─────── front process: AsyncLLM
                        └── UNIX socket ── vLLM's scheduler and ranks, which the front starts: IsthmusConnector

The front carries requests and tokens; what belongs to hand-offs never passes through it.
"""
