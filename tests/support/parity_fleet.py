"""Instances of any shape, started once and paired with many peers; few enough at a time for a small machine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from isthmus.v1 import coordinator_service_pb2

from fake_coordinator import FakeCoordinator, Response
from isthmus_worker.engine import Sampling
from parity_oracle import Case
from worker_process import BOTH, CONTEXT, GENERATION, WorkerProcess, leg, worker

READY = coordinator_service_pb2.PAIR_STATE_READY
MAX_RANKS = 6
# `run_split` or `run_at_once`.
Run = Callable[["Instance", "Instance", Case, int], Awaitable[tuple[list[int], Any]]]


@dataclass(frozen=True)
class Shape:
    """An instance: its model, its parallel sizes and any other settings ("section.key=value")."""

    model: Path
    tp: int = 1
    pp: int = 1
    dp: int = 1
    settings: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.tp * self.pp


class Instance:
    """A running one."""

    def __init__(self, shape: Shape, role: str, process: WorkerProcess, heard: FakeCoordinator) -> None:
        self.shape, self.role, self.process, self.heard = shape, role, process, heard
        self.paired: set[str] = set()

    @property
    def info(self) -> Any:
        """As the coordinator was told."""
        return self.heard.said("hello")[0].instance

    @property
    def rank_processes(self) -> list[psutil.Process]:
        """In the order of their start, which is that of the ranks."""
        return sorted(psutil.Process(self.process.process.pid).children(), key=lambda one: one.pid)


class Fleet:
    """`pair` gives a context and a generation instance that are connected; those that were not used for longest make
    room. `environment`: of all processes, beside this one's. Use as an async context manager."""

    def __init__(self, folder: Path, max_ranks: int = MAX_RANKS, environment: Mapping[str, str] | None = None) -> None:
        self._folder, self._max_ranks = folder, max_ranks
        self._environment = dict(environment or {})
        self._live: dict[tuple[Shape, str], tuple[Instance, AsyncExitStack]] = {}
        self._started = 0
        self._requests = 0

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._live):
            await self.stop(key)

    async def alone(self, shape: Shape) -> Instance:
        """An instance that does both legs."""
        return await self._get((shape, "context_and_generation"), shape.ranks)

    async def pair(self, context: Shape, generation: Shape) -> tuple[Instance, Instance]:
        """Both serve and are connected."""
        keys = ((context, "context"), (generation, "generation"))
        first = await self._get(keys[0], context.ranks + generation.ranks, keep=keys)
        second = await self._get(keys[1], context.ranks + generation.ranks, keep=keys)
        own = (one for one, _ in self._live.values() if one.role == "context" and one.shape.model == generation.model)
        contexts = [one.info for one in own]
        if first.info.instance_id not in second.paired:
            second.heard.send(Response(peers=coordinator_service_pb2.PeerSet(context_instances=contexts)))
            await second.heard.until(lambda: self._is_ready(first, second))
            second.paired.add(first.info.instance_id)
        return first, second

    async def start(self, *keys: tuple[Shape, str]) -> None:
        """Instances (shape, role) side by side. All of them have to fit beside those that are alive."""
        ranks = sum(shape.ranks for shape, _ in keys)
        if sum(one.ranks for one, _ in self._live) + ranks > self._max_ranks:
            raise ValueError(f"{ranks} ranks more than the {self._max_ranks} that may be alive")
        await asyncio.gather(*(self._get(key, key[0].ranks, keep=keys) for key in keys))

    async def stop(self, key: tuple[Shape, str]) -> None:
        """Ends an instance; it must hold nothing. One that a test has ended is only forgotten."""
        instance, stack = self._live.pop(key)
        try:
            if instance.process.process.returncode is None:
                await instance.process.idle()
        finally:
            await stack.aclose()

    def number(self) -> int:
        """For the next request."""
        self._requests += 1
        return self._requests

    @staticmethod
    def _is_ready(context: Instance, generation: Instance) -> bool:
        told = [one for one in generation.heard.said("pair") if one.context_instance_id == context.info.instance_id]
        if told and told[-1].incompatibilities:
            raise AssertionError(f"the pair is refused: {told[-1]}")
        return bool(told) and told[-1].state == READY

    async def _get(self, key: tuple[Shape, str], ranks: int, keep: tuple[Any, ...] = ()) -> Instance:
        if key in self._live:
            self._live[key] = self._live.pop(key)
            return self._live[key][0]
        shape, role = key
        for other in [one for one in self._live if one not in keep]:
            if sum(one.ranks for one, _ in self._live) + shape.ranks <= self._max_ranks:
                break
            await self.stop(other)
        stack = AsyncExitStack()
        heard = await stack.enter_async_context(FakeCoordinator())
        self._started += 1
        process = await stack.enter_async_context(
            worker(
                self._folder,
                heard.address,
                "engine.kind=torch",
                f"model.path={shape.model}",
                "model.name=model",
                "model.dtype=float32",
                "engine.num_blocks=64",
                "engine.max_running=16",
                "engine.max_batch_tokens=96",
                "engine.prefix_caching=false",
                f"parallel.tensor_parallel_size={shape.tp}",
                f"parallel.pipeline_parallel_size={shape.pp}",
                f"parallel.data_parallel_size={shape.dp}",
                f"worker.role={role}",
                f"worker.instance_id={role}-{self._started}",
                "transfer.on_transfer_failure=fail",
                *shape.settings,
                port=None,
                **self._environment,
            )
        )
        self._live[key] = Instance(shape, role, process, heard), stack
        assert await process.serving(120), process.log
        await heard.until(lambda: bool(heard.said("hello")))
        return self._live[key][0]


def request(case: Case, kind: int, number: int, params: Any = None) -> Any:
    """The leg of a case."""
    made = leg(case.prompt, case.new_tokens, kind=kind, number=number, params=params)
    sampling: Sampling = case.sampling
    if case.seeded:
        made.sampling.temperature = sampling.temperature
        made.sampling.top_p, made.sampling.top_k, made.sampling.seed = sampling.top_p, sampling.top_k, sampling.seed
    return made


def _tokens(chunks: Any) -> list[int]:
    return [token for one in chunks for token in array("I", one.tokens.le_uint32)]


async def run_alone(instance: Instance, case: Case, number: int) -> list[int]:
    """The tokens of an unsplit run."""
    stub = instance.process.stub
    answers = [one async for one in stub.Generate(request(case, BOTH, number), timeout=60)]
    return _tokens(one.tokens for one in answers if one.HasField("tokens"))


async def run_split(context: Instance, generation: Instance, case: Case, number: int) -> tuple[list[int], Any]:
    """The tokens of a run with a hand-off, and the report of the generation leg."""
    return await fetch(generation, case, number, await prefill(context, case, number))


async def prefill(context: Instance, case: Case, number: int) -> Any:
    """What the context leg answers."""
    stub = context.process.stub
    done = [one async for one in stub.Generate(request(case, CONTEXT, number), timeout=60)][-1]
    return done.context_ready.params


async def fetch(generation: Instance, case: Case, number: int, params: Any) -> tuple[list[int], Any]:
    """All tokens, those of the context leg included, and the report of the generation leg."""
    answers = [
        one async for one in generation.process.stub.Generate(request(case, GENERATION, number, params), timeout=60)
    ]
    rest = _tokens(one.tokens for one in answers if one.HasField("tokens"))
    return _tokens(params.first_tokens) + rest, answers[-1].finished.report


async def run_at_once(context: Instance, generation: Instance, case: Case, number: int) -> tuple[list[int], Any]:
    """As `run_split`, both legs started together."""
    first, second = request(case, CONTEXT, number), request(case, GENERATION, number)
    first.generation_waits = True
    info = context.info
    second.context_instance.endpoint, second.context_instance.instance_id = info.endpoint, info.instance_id
    second.context_instance.incarnation = info.incarnation

    async def answers(instance: Instance, made: Any) -> list[Any]:
        return [one async for one in instance.process.stub.Generate(made, timeout=60)]

    done, rest = await asyncio.gather(answers(context, first), answers(generation, second))
    tokens = _tokens(done[-1].context_ready.params.first_tokens)
    return tokens + _tokens(one.tokens for one in rest if one.HasField("tokens")), rest[-1].finished.report
