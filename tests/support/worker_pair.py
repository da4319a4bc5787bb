"""A context hub and a generation hub as processes, real transfer agents between their engines, the test as router."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.v1 import coordinator_service_pb2, worker_service_pb2
from isthmus.v1.generation_pb2 import ContextInstance

from fake_coordinator import FakeCoordinator, Response
from worker_process import CONTEXT, GENERATION, WorkerProcess, leg, worker

READY = coordinator_service_pb2.PAIR_STATE_READY


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers, and what the coordinator of the generation instance was told. `holder`: the context instance."""

    context: WorkerProcess
    generation: WorkerProcess
    heard: FakeCoordinator
    holder: ContextInstance

    async def prefill(self, prompt: list[int], max_tokens: int, number: int = 0) -> tuple[list[int], Any]:
        """First tokens and ContextPhaseParams."""
        request = leg(prompt, max_tokens, kind=CONTEXT, number=number)
        answers = [answer async for answer in self.context.stub.Generate(request, timeout=60)]
        params = answers[-1].context_ready.params
        return [token for one in params.first_tokens for token in array("I", one.tokens.le_uint32)], params

    async def decode(self, prompt: list[int], max_tokens: int, params: Any, number: int = 0) -> list[Any]:
        """Answers of the generation leg."""
        request = leg(prompt, max_tokens, kind=GENERATION, number=number, params=params)
        return [answer async for answer in self.generation.stub.Generate(request, timeout=60)]

    def at_once(
        self, prompt: list[int], max_tokens: int, number: int = 0, *, may_take_over: bool = False
    ) -> tuple[worker_service_pb2.WorkerServiceGenerateRequest, worker_service_pb2.WorkerServiceGenerateRequest]:
        """Context and generation leg of a request that starts both at once."""
        context = leg(prompt, max_tokens, kind=CONTEXT, number=number)
        context.generation_waits = True
        generation = leg(prompt, max_tokens, kind=GENERATION, number=number)
        generation.context_instance.CopyFrom(self.holder)
        generation.may_take_over = may_take_over
        return context, generation

    async def idle(self) -> None:
        """Returns when neither holds anything."""
        for one in (self.context, self.generation):
            await one.idle()
            while True:
                sessions = await one.sessions()
                if not sessions.sessions and not sessions.open_requests:
                    break
                await asyncio.sleep(0.02)
            assert sessions.free_pages == sessions.total_pages


@asynccontextmanager
async def running_pair(
    folder: Path, *settings: str, context: Sequence[str] = (), generation: Sequence[str] = ()
) -> AsyncGenerator[Pair, None]:
    """Both serve and are connected. `context` and `generation`: settings of one of them."""
    own = {"context": context, "generation": generation}
    async with AsyncExitStack() as stack:
        for_context = await stack.enter_async_context(FakeCoordinator())
        heard = await stack.enter_async_context(FakeCoordinator())
        prefills = await stack.enter_async_context(
            worker(
                folder, for_context.address, "worker.role=context", "worker.instance_id=c-0", *settings, *own["context"]
            )
        )
        generates = await stack.enter_async_context(
            worker(
                folder, heard.address, "worker.role=generation", "worker.instance_id=g-0", *settings, *own["generation"]
            )
        )
        assert await prefills.serving(), prefills.log
        assert await generates.serving(), generates.log
        instance = for_context.said("hello")[0].instance
        heard.send(Response(peers=coordinator_service_pb2.PeerSet(context_instances=[instance])))
        await heard.until(lambda: any(pair.state == READY for pair in heard.said("pair")))
        holder = ContextInstance(
            endpoint=instance.endpoint, instance_id=instance.instance_id, incarnation=instance.incarnation
        )
        yield Pair(prefills, generates, heard, holder)
