"""Sends a workload and takes the times, as a client sees them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus_client.client import Client
from isthmus_client.load.workload import Planned
from isthmus_core.errors import IsthmusError


@dataclass(frozen=True, slots=True)
class Measured:
    """One request, in seconds. `sent` after the start of the run. `gaps`: between two pieces of the answer, for each
    token of the later one. `error`: its status code and message; the times are then of no use."""

    sent: float
    first_token: float
    total: float
    prompt_tokens: int
    output_tokens: int
    gaps: tuple[float, ...]
    error: str = ""

    @property
    def per_token(self) -> float:
        """TPOT: from the first token to the last, for each token but the first; 0 for one token."""
        return (self.total - self.first_token) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


async def send_all(
    client: Client,
    planned: Sequence[Planned],
    *,
    model: str,
    concurrency: int,
    timeout_s: float,
    done: Callable[[Measured], None],
) -> list[Measured]:
    """Every request at its time, at most `concurrency` at once (0: no limit). A request that waits for a place is late:
    its times count from when it should have been sent. Returns in order of `planned`."""
    places = asyncio.Semaphore(concurrency) if concurrency else None
    start = time.perf_counter()

    async def one(request: Planned) -> Measured:
        await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
        if places is None:
            return await _send(client, request, model, timeout_s, start)
        async with places:
            return await _send(client, request, model, timeout_s, start)

    async def told(request: Planned) -> Measured:
        measured = await one(request)
        done(measured)
        return measured

    return list(await asyncio.gather(*(told(request) for request in planned)))


async def _send(client: Client, request: Planned, model: str, timeout_s: float, start: float) -> Measured:
    due = start + request.at
    first = last = 0.0
    tokens, gaps = 0, list[float]()
    error = ""
    try:
        parts = client.generate(
            list(request.prompt),
            model=model,
            max_tokens=request.max_tokens,
            min_tokens=request.max_tokens,
            temperature=0,
            timeout_s=timeout_s,
        )
        async for part in parts:
            now = time.perf_counter()
            count = len(part.token_ids)
            if count == 0:
                continue
            if tokens == 0:
                first = now
            else:
                gaps += [(now - last) / count] * count
            tokens, last = tokens + count, now
    except IsthmusError as failure:
        error = f"{failure.code.name}: {failure.message}"
    end = last or time.perf_counter()
    return Measured(request.at, max(0.0, first - due), end - due, len(request.prompt), tokens, tuple(gaps), error)
