"""Requests at a steady rate while processes are killed: who was answered, how, and how late."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import httpx
import psutil
from isthmus.v1 import coordinator_service_pb2

from cluster import assert_idle, running_cluster
from isthmus_client import Client
from isthmus_client.client import get_cluster
from isthmus_client.plan import ClusterOptions, merge
from isthmus_client.supervisor import LocalCluster
from isthmus_core.errors import IsthmusError
from isthmus_core.process import free_port

# What a client may be told when a process dies, or the rest of the cluster is full because of it.
FAULTS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)
# An answer, or an error, may come this much after the deadline on a busy machine.
LATE_S = 5.0


@dataclass
class Tally:
    """Outcomes of the requests. `failed`: by the typed error that the client was told. `lost`: by how the connection
    to a router broke, which no other process can save. `wrong`: answers that are not the model's. `late`: later than
    the deadline allows."""

    right: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])
    lost: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    late: list[float] = field(default_factory=list[float])
    recovered: int = 0

    @property
    def asked(self) -> int:
        """All of them."""
        return self.right + self.failed.total() + self.lost.total() + len(self.wrong)

    @property
    def share_failed(self) -> float:
        """Of all requests whose router lived."""
        return self.failed.total() / max(1, self.asked - self.lost.total())

    @property
    def share_lost(self) -> float:
        """Of all requests."""
        return self.lost.total() / max(1, self.asked)

    def __str__(self) -> str:
        return (
            f"{self.asked} requests: {self.right} right ({self.recovered} of them moved to other instances), "
            f"{self.lost.total()} lost with the connection to their router ({100 * self.share_lost:.2f} %), "
            f"{self.failed.total()} of the others failed ({100 * self.share_failed:.2f} %), "
            f"{len(self.wrong)} wrong, {len(self.late)} late"
            + "".join(f"\n  {count:4} lost: {why}" for why, count in self.lost.most_common())
            + "".join(f"\n  {count:4} failed: {why}" for why, count in self.failed.most_common())
        )


Expected = Callable[[Sequence[int], int], Sequence[int]]


class Load:
    """`rate` requests a second over several connections, each with a deadline of its own, until `stop`."""

    def __init__(
        self,
        endpoint: str,
        prompts: Sequence[Sequence[int]],
        expected: Expected,
        *,
        rate: float,
        max_tokens: int,
        timeout_s: float,
        connections: int = 4,
    ) -> None:
        self._clients = [Client(endpoint) for _ in range(connections)]
        self._prompts, self._expected = prompts, expected
        self._rate, self._max_tokens, self._timeout_s = rate, max_tokens, timeout_s
        self._running: set[asyncio.Task[None]] = set()
        self._answers: list[tuple[Sequence[int], Sequence[int]]] = []
        self._starter: asyncio.Task[None] | None = None
        self.tally = Tally()

    async def __aenter__(self) -> Load:
        self._starter = asyncio.create_task(self._start())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._starter is not None:
            self._starter.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for client in self._clients:
            await client.close()

    async def stop(self) -> Tally:
        """No more requests; the tally when all have ended. The answers are judged here, so that it costs no rate."""
        if self._starter is not None:
            self._starter.cancel()
        await asyncio.gather(*self._running)
        for prompt, answer in self._answers:
            if list(answer) == list(self._expected(prompt, self._max_tokens)):
                self.tally.right += 1
            else:
                self.tally.wrong.append(f"prompt of {len(prompt)} tokens: {list(answer)[:8]}…")
        return self.tally

    async def _start(self) -> None:
        began, number = time.monotonic(), 0
        draw = random.Random(1)
        while True:
            client = self._clients[number % len(self._clients)]
            task = asyncio.create_task(self._ask(client, draw.choice(self._prompts)))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            number += 1
            await asyncio.sleep(max(0.0, began + number / self._rate - time.monotonic()))

    async def _ask(self, client: Client, prompt: Sequence[int]) -> None:
        began = time.monotonic()
        try:
            answer = await client.answer(
                prompt, max_tokens=self._max_tokens, temperature=0.0, timeout_s=self._timeout_s
            )
        except IsthmusError as error:
            within = error.code in FAULTS or error.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if within and error.message:
                words = re.sub(r"\d{6,}|[\d.]+:\d+", "…", error.message)
                (self.tally.lost if connection_lost(error) else self.tally.failed)[f"{error.code.name} {words}"] += 1
            else:
                self.tally.wrong.append(f"{error.code.name}: {error.message}")
        else:
            self._answers.append((prompt, answer.token_ids))
            self.tally.recovered += bool(answer.end.retries)
        if (took := time.monotonic() - began) > self._timeout_s + LATE_S:
            self.tally.late.append(took)


def connection_lost(error: IsthmusError) -> bool:
    """Whether the client's own end says so: what a router says comes with a status of its own."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError) or cause.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return all(key != "grpc-status-details-bin" for key, _ in cause.trailing_metadata() or ())


def victim(cluster: LocalCluster, kind: str) -> psutil.Process | None:
    """The process that a name stands for: "coordinator", "router child", or the hub or rank of an instance, as
    "context-0 hub". None while it is not there."""
    name, _, part = kind.partition(" ")
    child = cluster.process(name)
    if not child.running:
        return None
    process = psutil.Process(child.pid)
    if not part or part == "hub":
        return process
    marks = {"child": "isthmus_router.fleet.child", "rank": "isthmus_worker.engine_process"}
    below = [one for one in process.children(recursive=True) if marks[part] in " ".join(one.cmdline())]
    return below[0] if below else None


async def kill_one(cluster: LocalCluster, kind: str, timeout_s: float = 30.0) -> None:
    """SIGKILL to a victim, as soon as it is there. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                found = victim(cluster, kind)
                if found is not None:
                    found.kill()
                    return
            except psutil.NoSuchProcess:
                pass  # it has died by itself, or with somebody else
            await asyncio.sleep(0.05)


async def whole(cluster: LocalCluster, *, pairs: int, routers: int, control: str) -> bool:
    """True while every pair of instances is ready and every router process serves."""
    try:
        state = await get_cluster(cluster.coordinator_endpoint, timeout_s=5)
        async with httpx.AsyncClient(trust_env=False, timeout=5) as http:
            health = (await http.get(f"http://{control}/health")).json()
    except (IsthmusError, httpx.TransportError):
        return False
    ready = sum(pair.state == coordinator_service_pb2.PAIR_STATE_READY for pair in state.pairs)
    return ready == pairs and sum(row["status"] == "ok" for row in health["processes"].values()) == routers


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Wait until something holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Site:
    """A cluster whose dead processes are started again; `control`: host:port of the router fleet's parent."""

    cluster: LocalCluster
    control: str
    pairs: int

    async def whole(self) -> bool:
        """True while every pair of instances is ready and both router processes serve."""
        return await whole(self.cluster, pairs=self.pairs, routers=2, control=self.control)


@asynccontextmanager
async def chaos_cluster(options: ClusterOptions, folder: Path) -> AsyncGenerator[Site, None]:
    """A cluster behind two router processes."""
    control = f"127.0.0.1:{free_port()}"
    settings = {"worker": {"drain_s": 2}, "router": {"drain_s": 5, "num_workers": 2, "control_listen": control}}
    options = replace(options, base=merge(options.base, settings))
    async with running_cluster(options, folder, restart=True, clean=False, start_timeout_s=240) as cluster:
        stopping = asyncio.Event()
        keeping = asyncio.create_task(cluster.supervise(stopping))
        try:
            yield Site(cluster, control, options.context * options.generation)
        finally:
            stopping.set()
            await keeping


async def run_chaos(
    site: Site,
    victims: Sequence[str],
    prompts: Sequence[Sequence[int]],
    expected: Expected,
    *,
    rate: float,
    max_tokens: int,
    pause_s: float,
    timeout_s: float = 20.0,
    recovery_s: float = 60.0,
) -> Tally:
    """Kill the victims one after the other under load, each when the cluster is whole again, and prove that nothing is
    left of any of it. Raises AssertionError for a wrong or late answer."""
    cluster = site.cluster
    async with Load(
        cluster.grpc_endpoint, prompts, expected, rate=rate, max_tokens=max_tokens, timeout_s=timeout_s
    ) as load:
        for kind in victims:
            await until(site.whole, recovery_s)
            await asyncio.sleep(pause_s)
            await kill_one(cluster, kind)
            await asyncio.sleep(pause_s)
        await until(site.whole, recovery_s)
        tally = await load.stop()
    print(tally)
    await assert_idle(cluster, 40)
    assert not tally.wrong, tally.wrong[:5]
    assert not tally.late, tally.late
    return tally
