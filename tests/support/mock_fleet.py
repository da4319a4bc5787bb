"""Many workers without engines: each is a member by the real protocol and tells its load, its pairs, its blocks."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus_core.block_keys import Keying
from isthmus_core.ids import MIN_GLOBAL_ID, new_incarnation
from isthmus_core.keys import RequestKey
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.coordinator_messages import InstanceRef
from isthmus_router.ports import PlacementRequest
from isthmus_worker.engine import EngineLoad, KvEvent
from isthmus_worker.process_engine.cached_keys import CachedKeys
from isthmus_worker.registration import Registration
from isthmus_worker.wire.registration import ContextPeer, InstanceDescription, PairView
from kvtransfer.rank_info import InstanceRole

KEYING = Keying(b"weights", b"attention", "float32", 16)
CONNECTING, READY = 1, 2
MAX_PEERS = 32
# Blocks of an instance.
MOST_KEYS = 64


class MockWorker:
    """A member whose streams to peers are ready at once."""

    def __init__(self, target: str, name: str, role: InstanceRole, share: int) -> None:
        self.name, self.role, self._share = name, role, share
        self.incarnation = new_incarnation()
        self.cached = CachedKeys()
        self.load = EngineLoad()
        self._keys: list[bytes] = []
        self._peers: set[ContextPeer] = set()
        description = InstanceDescription(
            name, self.incarnation, f"{name}:1", role, "mock", 1 << 16, 16, "mock", 4096, KEYING, ()
        )
        self.registration = Registration(
            target, description, on_peers=self._on_peers, kv_events=lambda: self.cached.follow()
        )

    def _on_peers(self, peers: Sequence[ContextPeer]) -> None:
        # As real hubs, it keeps streams to a bounded number of peers, another choice for each.
        chosen = {peer for peer in peers if not (peer.incarnation[0] ^ self.incarnation[0]) % self._share}
        for peer in chosen - self._peers:
            self.registration.set_pair(PairView(peer.instance_id, peer.incarnation, READY))
        for peer in self._peers - chosen:
            self.registration.set_pair(PairView(peer.instance_id, peer.incarnation, CONNECTING))
        self._peers = chosen

    async def start(self) -> None:
        await self.registration.start(300)

    def beat(self, rng: random.Random) -> None:
        """Another load, some blocks; the oldest ones make room."""
        self.load = EngineLoad(running_requests=rng.randrange(8), used_blocks=rng.randrange(4096))
        self.registration.set_load(self.load)
        new = [rng.randbytes(16) for _ in range(rng.randrange(4))]
        self._keys += new
        gone = self._keys[:-MOST_KEYS]
        del self._keys[:-MOST_KEYS]
        self.cached.apply(KvEvent(stored=tuple(new), removed=tuple(gone)))

    async def close(self) -> None:
        self.cached.close()
        await self.registration.close()


@dataclass
class Truth:
    """What was placed and is not finished, by start of an instance; how many requests there were; what failed."""

    open: Counter[tuple[str, bytes]] = field(default_factory=Counter[tuple[str, bytes]])
    asked: int = 0
    failed: Counter[str] = field(default_factory=Counter[str])


class MockFleet:
    """`size` workers, half of them context instances. `seed` also names them; `whole`: workers of all fleets of the
    cluster."""

    def __init__(self, target: str, size: int, seed: int = 0, whole: int = 0) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._seed, self._whole = seed, whole or size
        self._next = 0
        self.workers: list[MockWorker] = []
        self._size = size

    async def start(self) -> None:
        """All of them, some at a time."""
        for begin in range(0, self._size, 50):
            await asyncio.gather(*(self._add(at % 2 == 0) for at in range(begin, min(begin + 50, self._size))))

    async def _add(self, context: bool) -> None:
        self._next += 1
        role = InstanceRole.CONTEXT if context else InstanceRole.GENERATION
        share = max(1, self._whole // 2 // MAX_PEERS)
        worker = MockWorker(self._target, f"{role.name.lower()}-{self._seed}-{self._next}", role, share)
        self.workers.append(worker)
        await worker.start()

    async def beat(self, seconds: float, interval_s: float) -> None:
        """Everybody has news every `interval_s` seconds, spread over that time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            for worker in self._rng.sample(self.workers, max(1, len(self.workers) // 20)):
                worker.beat(self._rng)
            await asyncio.sleep(interval_s / 20)

    async def churn(self, seconds: float, share_per_minute: float) -> int:
        """Workers leave and others come, at a steady rate. Returns how many."""
        loop = asyncio.get_running_loop()
        begin, pause = loop.time(), 60 / (share_per_minute * self._size)
        replaced = 0
        while replaced < int(seconds / pause):
            await asyncio.sleep(max(0.0, begin + (replaced + 1) * pause - loop.time()))
            gone = self.workers.pop(self._rng.randrange(len(self.workers)))
            await gone.close()
            await self._add(gone.role is InstanceRole.CONTEXT)
            replaced += 1
        return replaced

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))


async def request(router: CoordinatorClient, truth: Truth, number: int, rng: random.Random) -> None:
    """Place a request, hold it for a while, finish it."""
    key = RequestKey(MIN_GLOBAL_ID + number, 0)
    truth.asked += 1
    question = PlacementRequest(key, "mock", 64, 32, prompt=rng.randbytes(256))
    placement = await router.select(question, 60)
    legs = [ref for ref in (placement.context, placement.generation) if ref is not None]
    _count(truth, legs, 1)
    await asyncio.sleep(rng.uniform(0.01, 0.3))
    router.prefilled(key)
    await asyncio.sleep(rng.uniform(0.01, 0.3))
    router.finish(key)
    _count(truth, legs, -1)


def _count(truth: Truth, legs: Sequence[InstanceRef], sign: int) -> None:
    for leg in legs:
        truth.open[leg.instance_id, leg.incarnation] += sign


async def load(router: CoordinatorClient, truth: Truth, seconds: float, per_s: float, seed: int = 1) -> None:
    """Requests at a rate; errors are counted by their text."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    end, number, running = loop.time() + seconds, seed << 24, set[asyncio.Task[None]]()
    while loop.time() < end:
        number += 1
        task = asyncio.create_task(request(router, truth, number, rng))
        running.add(task)
        task.add_done_callback(running.discard)
        await asyncio.sleep(rng.expovariate(per_s))
    for result in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(result, BaseException):
            truth.failed[repr(result)] += 1
