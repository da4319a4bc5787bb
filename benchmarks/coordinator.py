"""The coordinator with 1,000 workers and 5 million indexed (block, worker) pairs: memory, ingest, choices a second.

    python benchmarks/coordinator.py [--quick] [--json FILE]

500 context and 500 generation instances, every pair ready. Half of the blocks of a context instance belong to shared
prefixes of 100 blocks, which about 25 instances each have; the others are its own. A prompt has 200 blocks: a shared
prefix and a rest that one instance has. Rates count CPU seconds of the one thread that works, so that a busy machine
does not change them; the last row has wall seconds of client and server on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import coordinator_service_pb2_grpc
from isthmus.v1.common_pb2 import RequestKey as RequestKeyPb
from isthmus.v1.kv_index_pb2 import KvEvents, PromptKeys
from report import Row, argument_parser, below, figure, show

from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.kv_stream import KvStream
from isthmus_coordinator.leases import LeaseTable
from isthmus_coordinator.membership import Instance, Member, Role
from isthmus_coordinator.pairs import Pair, PairState
from isthmus_coordinator.placement import Question
from isthmus_coordinator.policies import Policy
from isthmus_coordinator.server import CoordinatorServicer, Limits
from isthmus_coordinator.wire import kv_from_pb
from isthmus_core.block_keys import Keying
from isthmus_core.config import TelemetryConfig
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.rpc import RpcServer, open_channel
from isthmus_core.tracing import Tracing

KEYING = Keying(b"weights", b"attention", "bfloat16", 16)
WORKERS, PAIRS = 1000, 5_000_000
BATCH = 256
PREFIX, REST = 100, 100
PREFIXES, HOLDERS = 200, 25
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Blocks:
    """Keys by context instance, and of the shared prefixes."""

    own: list[Keys]
    shared: list[Keys]
    prefixes: Keys

    @property
    def nbytes(self) -> int:
        """What the benchmark itself holds."""
        return sum(one.nbytes for one in (*self.own, *self.shared, self.prefixes))


def make_blocks(contexts: int, pairs: int) -> Blocks:
    """Keys as random numbers: they are hashes."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, 2**64, size=(PREFIXES, PREFIX, 2), dtype=np.uint64)
    per_context = pairs // contexts
    taken = max(1, min(PREFIXES, PREFIXES * HOLDERS // contexts, per_context // (2 * PREFIX)))
    shared = [prefixes[rng.permutation(PREFIXES)[:taken]].reshape(-1, 2) for _ in range(contexts)]
    own = [rng.integers(0, 2**64, size=(per_context - len(one), 2), dtype=np.uint64) for one in shared]
    return Blocks(own, shared, prefixes)


def rss() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_cluster() -> tuple[Cluster, list[Member]]:
    """All instances, all pairs ready. Returns the context instances too."""
    cluster = Cluster(Policy.KV_AWARE)
    members: list[Member] = []
    for number in range(WORKERS):
        role = Role.CONTEXT if number % 2 == 0 else Role.GENERATION
        name = f"{role.name.lower()}-{number}"
        incarnation = number.to_bytes(16, "little")
        one = Instance(name, incarnation, f"{name}:1", role, "m", 1 << 17, 16, "mock", 2, 1 << 20, KEYING)
        members.append(cluster.join(one)[0])
    ready = Pair(PairState.READY)
    contexts = [member for member in members if member.role is Role.CONTEXT]
    for member in members:
        if member.role is Role.GENERATION:
            cluster.announced(member, cluster.peers(member))
            for context in contexts:
                cluster.report(member, context.instance.start, ready)
    return cluster, contexts


def ingest(cluster: Cluster, contexts: list[Member], blocks: Blocks) -> float:
    """Tell the index everything, as messages; blocks a CPU second."""
    total, spent = 0, 0.0
    for member, own, shared in zip(contexts, blocks.own, blocks.shared, strict=True):
        stream = KvStream(cluster.index, member.number)
        data = np.concatenate([shared, own])
        messages = [
            KvEvents(sequence=1 + at, reset=at == 0, stored=data[begin : begin + BATCH].tobytes()).SerializeToString()
            for at, begin in enumerate(range(0, len(data), BATCH))
        ]
        began = time.thread_time()
        for message in messages:
            stream.take(kv_from_pb(KvEvents.FromString(message)))
        spent += time.thread_time() - began
        total += len(data)
    return total / spent


def prompts(blocks: Blocks, count: int) -> list[bytes]:
    """Joined keys of prompts."""
    rng = np.random.default_rng(1)
    found: list[bytes] = []
    for _ in range(count):
        prefix = blocks.prefixes[rng.integers(PREFIXES)]
        own = blocks.own[rng.integers(len(blocks.own))]
        begin = rng.integers(max(1, len(own) - REST))
        found.append(np.concatenate([prefix, own[begin : begin + REST]]).tobytes())
    return found


def choices(cluster: Cluster, keys: list[bytes]) -> float:
    """select, a CPU second. A thousand requests are open at any time, as far as there are so many."""
    questions = [
        Question(RequestKey(MIN_GLOBAL_ID + number, 0), "m", 16 * (PREFIX + REST), 256, {KEYING.keying_id: one})
        for number, one in enumerate(keys)
    ]
    spent, step = 0.0, 250
    for begin in range(0, len(questions), step):
        began = time.thread_time()
        for question in questions[begin : begin + step]:
            cluster.select(1, question)
        spent += time.thread_time() - began
        for question in questions[max(0, begin - WORKERS) : max(0, begin - WORKERS + step)]:
            cluster.finish(1, question.key)
    cluster.drop_router(1)
    return len(questions) / spent


async def over_route(cluster: Cluster, keys: list[bytes]) -> float:
    """Decisions a wall second over one Route stream, 64 in flight, client and server in this thread."""
    leases = LeaseTable(10.0, grace_s=0.0, started=time.monotonic())
    servicer = CoordinatorServicer(
        leases, Tracing.from_config(TelemetryConfig(sample_ratio=0), "benchmark"), Limits(), cluster=cluster
    )
    server = RpcServer()
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(servicer, server.server)
    port = await server.start("127.0.0.1:0", "benchmark")
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel).Route()
        await call.write(pb.RouteRequest(hello=pb.RouteHello(router_id="benchmark")))
        room = asyncio.Semaphore(64)

        async def read() -> None:
            done = 0
            while done < len(keys):
                message = await call.read()
                if not isinstance(message, pb.RouteResponse):
                    raise RuntimeError("the coordinator ended the stream")
                if message.WhichOneof("body") == "selected":
                    done += 1
                    room.release()

        reading = asyncio.create_task(read())
        began = time.perf_counter()
        for number, one in enumerate(keys):
            await room.acquire()
            key = RequestKeyPb(request_id=MIN_GLOBAL_ID + number)
            select = pb.Select(key=key, model="m", prompt_tokens=16 * (PREFIX + REST), max_tokens=256)
            select.prompt_keys.append(PromptKeys(keying_id=KEYING.keying_id, keys=one))
            await call.write(pb.RouteRequest(select=select))
            await call.write(pb.RouteRequest(finish=pb.Finish(key=key)))
        await reading
        spent = time.perf_counter() - began
        call.cancel()
    servicer.end_streams()
    await server.stop(1)
    return len(keys) / spent


def main() -> None:
    """Measure and show."""
    arguments = argument_parser(__doc__).parse_args()
    pairs, count = (500_000, 3000) if arguments.quick else (PAIRS, 20_000)
    cluster, contexts = make_cluster()
    blocks = make_blocks(len(contexts), pairs)
    before = rss()
    ingested = ingest(cluster, contexts, blocks)
    each = (rss() - before) / pairs
    keys = prompts(blocks, count)
    choices(cluster, keys[:1000])
    chosen = max(choices(cluster, keys) for _ in itertools.repeat(None, 3))
    routed = asyncio.run(over_route(cluster, keys[: count // 4]))
    began = time.thread_time()
    cluster.leave(contexts[0])
    gone = (time.thread_time() - began) * 1e3
    rows = [
        below(f"index: memory for {pairs:,} (block, worker) pairs", each, "bytes a pair", 120),
        Row("ingest, KvEvents of 256 keys", ingested, "blocks/s", None, None, ">= 200,000", ingested >= 200_000),
        Row("select, 200 blocks, 1,000 workers", chosen, "calls/s", None, None, ">= 10,000", chosen >= 10_000),
        figure("decisions over Route, client and server in one thread", routed, "decisions/s"),
        figure(f"a worker with {pairs // len(contexts):,} blocks leaves", gone, "ms"),
    ]
    show("Coordinator", rows, arguments.json)


if __name__ == "__main__":
    main()
