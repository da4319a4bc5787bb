"""Workers of vLLM and of the reference engine on one model, the test as their router and coordinator."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.v1 import coordinator_service_pb2, generation_pb2, kv_index_pb2, worker_service_pb2

from fake_coordinator import FakeCoordinator, Response
from isthmus_core.block_keys import split_keys
from scrape import port_in, scrape_port, total
from worker_process import BOTH, CONTEXT, GENERATION, WorkerProcess, leg, tokens, worker

ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"
READY = coordinator_service_pb2.PAIR_STATE_READY
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

# Of a worker whose bytes are looked at.
METRICS = ["telemetry.metrics_listen=127.0.0.1:0"]

# Context and generation; two of vLLM, or one of each engine.
PAIRS = [
    ("vllm-context", "vllm-generation"),
    ("torch-context", "vllm-generation"),
    ("vllm-context", "torch-generation"),
]


def prompt(length: int) -> list[int]:
    """Different for every length: nothing of one is in the prefix cache for another."""
    return [(length * 131 + place * 37) % 40_000 + 5 for place in range(length)]


@dataclass(frozen=True, slots=True)
class Member:
    """One worker and the coordinator it is registered with."""

    name: str
    process: WorkerProcess
    coordinator: FakeCoordinator

    @property
    def instance(self) -> Any:
        """As it has introduced itself."""
        return self.coordinator.said("hello")[0].instance


@dataclass(slots=True)
class World:
    """Workers by name: "vllm-context", "torch-generation", and so on."""

    _start: Callable[[str], Awaitable[Member]]
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    _number: int = 0

    async def restart(self, name: str) -> None:
        """Another worker of that name, after the one before has left."""
        await self.members[name].process.exit_code()
        member = self.members[name] = await self._start(name)
        assert await member.process.serving(600), member.process.log
        await connect(self)

    def number(self) -> int:
        """A new request."""
        self._number += 1
        return self._number

    def leg(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        n: int = 1,
        stop: Sequence[int] = (),
        adapter: str = "",
        **about: Any,
    ) -> Any:
        """A leg of `worker_process.leg` with `n` answers."""
        request = leg(prompt, max_tokens, **about)
        request.adapter = adapter
        request.sampling.n = n
        request.sampling.stop_token_ids.extend(stop)
        return request

    async def read(self, name: str, request: Any) -> list[Any]:
        """All answers of a leg."""
        return [answer async for answer in self.members[name].process.stub.Generate(request, timeout=120)]

    async def prefill(
        self, name: str, prompt: Sequence[int], max_tokens: int, number: int, **about: Any
    ) -> tuple[list[int], Any]:
        """First tokens, one of each answer, and ContextPhaseParams of a context leg."""
        answers = await self.read(name, self.leg(prompt, max_tokens, kind=CONTEXT, number=number, **about))
        params = answers[-1].context_ready.params
        return [token for one in params.first_tokens for token in array("I", one.tokens.le_uint32)], params

    async def split(self, context: str, generation: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """All tokens of a request whose legs run on two workers."""
        (answer,) = await self.split_answers(context, generation, prompt, max_tokens)
        return answer

    async def split_answers(
        self, context: str, generation: str, prompt: Sequence[int], max_tokens: int, **about: Any
    ) -> list[list[int]]:
        """The same with several answers (`n`, `stop`)."""
        number = self.number()
        first, params = await self.prefill(context, prompt, max_tokens, number, **about)
        request = self.leg(prompt, max_tokens, kind=GENERATION, number=number, params=params, **about)
        return _joined(first, await self.read(generation, request))

    async def at_once(
        self, context: str, generation: str, prompt: Sequence[int], max_tokens: int, **about: Any
    ) -> list[list[int]]:
        """The same with both legs started at the same time."""
        number = self.number()
        before, after = (
            self.leg(prompt, max_tokens, kind=kind, number=number, **about) for kind in (CONTEXT, GENERATION)
        )
        before.generation_waits = True
        holder = self.members[context].instance
        after.context_instance.CopyFrom(
            generation_pb2.ContextInstance(
                endpoint=holder.endpoint, instance_id=holder.instance_id, incarnation=holder.incarnation
            )
        )
        context_said, said = await asyncio.gather(self.read(context, before), self.read(generation, after))
        ready = context_said[-1].context_ready.params
        first = [token for one in ready.first_tokens for token in array("I", one.tokens.le_uint32)]
        return _joined(first or tokens(context_said), said)

    async def whole(self, name: str, prompt: Sequence[int], max_tokens: int, **about: Any) -> list[int]:
        """All tokens of a request that runs on one worker."""
        return tokens(await self.read(name, self.leg(prompt, max_tokens, kind=BOTH, number=self.number(), **about)))

    async def abort(self, name: str, number: int) -> None:
        """Withdraws a request."""
        request = worker_service_pb2.AbortRequest(key=leg([1], 1, number=number).key)
        await self.members[name].process.stub.Abort(request, timeout=10)

    def ask_for_blocks(self, *names: str) -> None:
        """The workers tell their coordinators which blocks they can reuse, from now on."""
        for name in names:
            self.members[name].coordinator.send(Response(send_kv_snapshot=kv_index_pb2.SendKvSnapshot()))

    def blocks(self, name: str) -> set[bytes]:
        """Keys of blocks that a worker has told about."""
        told: set[bytes] = set()
        for event in self.members[name].coordinator.said("kv_events"):
            told.update(split_keys(event.stored))
        return told

    async def written(self, name: str, mode: str) -> float:
        """Bytes that a context worker has written so far, `direct` or `bounced`; they are counted shortly after the
        peer has them. Among its settings are `METRICS`."""
        samples = await scrape_port(port_in(self.members[name].process.log, name))
        return total(samples, "isthmus_transfer_bytes_total", mode=mode)

    async def idle(self, *names: str) -> None:
        """Returns when the workers hold nothing; the bound is the test's own timeout."""
        for name in names or tuple(self.members):
            process = self.members[name].process
            await process.idle()
            while (sessions := await process.sessions()).sessions or sessions.open_requests:
                await asyncio.sleep(0.05)
            assert sessions.free_pages == sessions.total_pages, name


def _joined(first: Sequence[int], said: Sequence[Any]) -> list[list[int]]:
    """Every answer: its first token and what the generation leg has said of it, which was no second try."""
    report = said[-1].finished.report
    assert not report.handoff_failures, report.handoff_failures
    assert not report.recomputed
    answers = [[token] for token in first]
    for one in said:
        answers[one.tokens.sample] += array("I", one.tokens.tokens.le_uint32)
    return answers


def vllm_settings(model: Path, **arguments: Any) -> list[str]:
    """Of a worker with vLLM; `arguments` are vLLM's own."""
    own = {"enforce_eager": True, **arguments}
    return [
        "engine.kind=vllm",
        f"engine.python={VLLM_PYTHON}",
        f"engine.vllm={json.dumps(own)}",
        *_model(model),
    ]


def torch_settings(model: Path) -> list[str]:
    """Of a worker with the reference engine."""
    return ["engine.kind=torch", "engine.num_blocks=1024", "engine.max_running=16", *_model(model)]


def _model(model: Path) -> list[str]:
    return [
        f"model.path={model}",
        "model.name=m",
        "model.dtype=float32",
        "engine.max_model_len=4096",
        "engine.num_threads=1",
        "worker.start_timeout_s=120",
        "worker.engine_start_timeout_s=600",
    ]


async def until(condition: Callable[[], bool]) -> None:
    """The bound is the test's own timeout."""
    while not condition():
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running_world(folder: Path, settings: dict[str, list[str]]) -> AsyncGenerator[World, None]:
    """Workers by name; the last word of a name is the role. All pairs are connected when it is entered."""
    async with AsyncExitStack() as stack:

        async def start(name: str) -> Member:
            coordinator = await stack.enter_async_context(FakeCoordinator())
            given = [*settings[name], f"worker.role={name.rpartition('-')[2]}", f"worker.instance_id={name}"]
            process = await stack.enter_async_context(
                worker(folder, coordinator.address, *given, port=None, **ENVIRONMENT)
            )
            return Member(name, process, coordinator)

        world = World(start)
        for name in settings:  # all start at once
            world.members[name] = await start(name)
        for member in world.members.values():
            assert await member.process.serving(600), member.process.log
        await connect(world)
        yield world


async def connect(world: World) -> None:
    """Tells every generation instance of every context instance, and waits until the pairs are ready."""
    for member in world.members.values():
        await member.coordinator.until(lambda member=member: bool(member.coordinator.said("hello")))
    contexts = [one.instance for name, one in world.members.items() if name.endswith("context")]
    for name, member in world.members.items():
        if name.endswith("generation"):
            member.coordinator.send(Response(peers=coordinator_service_pb2.PeerSet(context_instances=contexts)))
            wanted = {one.incarnation for one in contexts}
            await member.coordinator.until(
                lambda member=member, wanted=wanted: (
                    wanted
                    <= {pair.context_incarnation for pair in member.coordinator.said("pair") if pair.state == READY}
                )
            )
