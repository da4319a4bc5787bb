"""The control plane cut while the data plane lives: bytes arrive, nobody can say so, and nothing is claimed or lost."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from isthmus.v1 import coordinator_service_pb2
from isthmus.v1.generation_pb2 import ContextInstance

from fake_coordinator import FakeCoordinator, Response
from mock_oracle import oracle
from rank_process import needs_nixl
from worker_pair import READY, Pair
from worker_process import worker

pytestmark = [pytest.mark.integration, needs_nixl]

CONNECTING = coordinator_service_pb2.PAIR_STATE_CONNECTING
PROMPT = [40 + index % 50 for index in range(70)]


class Wire:
    """A TCP relay to a hub. While `back` is not set nothing comes from the hub any more, and nobody is told."""

    def __init__(self, endpoint: str) -> None:
        self._host, self._port = endpoint.rsplit(":", 1)
        self.back = asyncio.Event()
        self.back.set()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[str, None]:
        """Its own address."""
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        async with server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _relay(self, near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(self._host, int(self._port))
        try:
            await asyncio.gather(self._pump(near_in, far_out), self._pump(far_in, near_out, self.back))
        except ConnectionError:
            pass  # either end has gone, as it may
        finally:
            far_out.close()
            near_out.close()

    async def _pump(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, gate: asyncio.Event | None = None
    ) -> None:
        while data := await source.read(1 << 16):
            if gate is not None:
                await gate.wait()
            to.write(data)
            await to.drain()
        to.close()


@asynccontextmanager
async def wired_pair(folder: Path) -> AsyncGenerator[tuple[Pair, Wire], None]:
    """The generation instance reaches the context instance over the wire; the bytes of the cache go their own way."""
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(FakeCoordinator())
        heard = await stack.enter_async_context(FakeCoordinator())
        quick = "transfer.ping_interval_s=0.2"
        context = await stack.enter_async_context(
            worker(folder, near.address, "worker.role=context", "worker.instance_id=c-0", quick)
        )
        generation = await stack.enter_async_context(
            worker(folder, heard.address, "worker.role=generation", "worker.instance_id=g-0", quick)
        )
        assert await context.serving(), context.log
        assert await generation.serving(), generation.log
        instance = near.said("hello")[0].instance
        wire = Wire(instance.endpoint)
        instance.endpoint = await stack.enter_async_context(wire.open())
        heard.send(Response(peers=coordinator_service_pb2.PeerSet(context_instances=[instance])))
        await heard.until(lambda: any(pair.state == READY for pair in heard.said("pair")))
        yield Pair(context, generation, heard, ContextInstance()), wire


def text(answers: list[Any]) -> list[int]:
    return [token for answer in answers for token in array("I", answer.tokens.tokens.le_uint32)]


@pytest.mark.timeout(120)
async def test_what_arrived_while_nobody_could_say_so_is_told_after_the_cut(tmp_path: Path):
    async with wired_pair(tmp_path) as (pair, wire):
        first, params = await pair.prefill(PROMPT, 9)
        wire.back.clear()
        decode = asyncio.create_task(pair.decode(PROMPT, 9, params))
        # The context instance has written everything and let go of its pages.
        await pair.context.idle()
        # Silence makes the stream suspect. Neither that nor the bytes that are there make the cache complete.
        await pair.heard.until(lambda: pair.heard.said("pair")[-1].state == CONNECTING)
        assert not decode.done()
        (session,) = (await pair.generation.sessions()).sessions
        assert session.in_doubt
        wire.back.set()
        assert first + text(await decode) == oracle(PROMPT, 9)
        await pair.idle()
