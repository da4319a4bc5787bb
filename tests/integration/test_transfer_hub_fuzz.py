"""Streams of nonsense against a real servicer: no crash, no hang, bounded memory, the stream ends with a status."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.v1 import kv_transfer_service_pb2, transfer_pb2

from hub_world import Side, blocks, connect, key, until
from isthmus_core.rpc import open_channel
from kvtransfer import wire
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.control.negotiation import Dialect, limits_of, make_hello
from kvtransfer.messages import Cancel, KvIntent, KvRequest, PeerBody, Ping, ReceiveKey, Reconcile
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

EXAMPLES = 150
PATH = "/isthmus.v1.KvTransferService/Connect"
# Whatever the nonsense, the peer is at fault or the stream simply ends.
STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
}


# What grpc's client says when the server has ended the stream under its write.
OVERTAKEN = (grpc.StatusCode.INTERNAL, "Internal error from Core")


@asynccontextmanager
async def world() -> AsyncIterator[tuple[Side, Side, Side]]:
    """A pair that works, and a stranger whose words are mutated: whoever speaks in the name of a
    real incarnation with a later connection epoch replaces its stream by right."""
    fabric = LoopbackFabric()
    context = Side("c", InstanceRole.CONTEXT, fabric)
    generation, stranger = (Side(name, InstanceRole.GENERATION, fabric) for name in ("g", "s"))
    sides = (context, generation, stranger)
    for side in sides:
        await side.start()
    try:
        yield sides
    finally:
        for side in reversed(sides):
            await side.stop()


def sentences(context: Side, stranger: Side) -> list[bytes]:
    """Valid envelopes of a generation instance, to be mutated."""
    hello = make_hello(stranger.hub.instance, limits_of(stranger.config), 1, Dialect())
    tokens = TokenRange(0, 8)
    request = KvRequest(key(1), receive=1, tokens=tokens, destinations=blocks(1, 2))
    bodies: list[PeerBody] = [
        hello,
        request,
        KvIntent(key(2)),
        Cancel(key(1), 1),
        Reconcile((ReceiveKey(key(1), 1),)),
        Ping(7),
    ]
    return [
        kv_transfer_service_pb2.ConnectRequest(
            src_incarnation=stranger.incarnation,
            dst_incarnation=b"" if body is hello else context.incarnation,
            messages=[wire.peer_message_to_pb(body)],
        ).SerializeToString()
        for body in bodies
    ]


async def stream(endpoint: str, frames: Iterable[bytes], limit_s: float = 20.0) -> tuple[grpc.StatusCode, str]:
    """Sends raw envelopes, ends its side, and reads to the end."""
    async with open_channel(endpoint) as channel, asyncio.timeout(limit_s):
        call: Any = channel.stream_stream(PATH)()

        async def say() -> None:
            try:
                for frame in frames:
                    await call.write(frame)
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the server has ended the stream first

        saying = asyncio.create_task(say())
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        code, text = await call.code(), await call.details()
        await saying
        return code, text or ""


async def answered(endpoint: str, frames: Sequence[bytes]) -> tuple[grpc.StatusCode, str]:
    """The server's own status: asked again where it ended the stream under a write, of which grpc makes its own."""
    for _ in range(50):
        if (said := await stream(endpoint, frames)) != OVERTAKEN:
            return said
    return OVERTAKEN


def mutate(data: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, removed, repeated or put in."""
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(out)) if out else 0
        match draw.randrange(4):
            case 0 if out:
                out[at] = draw.randrange(256)
            case 1:
                del out[at : at + draw.choice([1, 1, 4, 64])]
            case 2:
                out[at:at] = out[at : at + draw.choice([1, 8, 64])]
            case _:
                out[at:at] = draw.randbytes(draw.choice([1, 2, 16]))
    return bytes(out)


async def serves(context: Side, generation: Side) -> None:
    """The instance still does its work, and nothing is left of the nonsense."""
    await connect(generation, context)
    one = key(4000)
    context.offer(one, 5, 6)
    generation.ask(one, context.holder, 8, 9)
    await until(lambda: generation.scheduler.check_gen_transfer_status(0))
    assert generation.block_bytes(8, 9) == context.block_bytes(5, 6)
    await until(lambda: not context.hub.sessions() and context.hub.is_idle())


class Fuzzed:
    """One pair of instances for many examples, on a loop that outlives each of them."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self._world = world()
        self.context, self.generation, stranger = self.runner.run(self._world.__aenter__())
        self.good = sentences(self.context, stranger)

    def stream(self, frames: Sequence[bytes]) -> None:
        """Nonsense in, a status out."""
        code, text = self.runner.run(stream(self.context.endpoint, frames))
        assert code in STATUSES or (code, text) == OVERTAKEN, (code, text)
        assert "Traceback" not in text

    def close(self) -> None:
        """The instance still works after all of it."""
        self.runner.run(serves(self.context, self.generation))
        self.runner.run(self._world.__aexit__(None, None, None))
        del self.context, self.generation, self._world
        gc.collect()  # servers end on the loop they were made on
        self.runner.close()


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    made = Fuzzed()
    yield made
    made.close()


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=EXAMPLES, deadline=None)
def test_mutated_messages_end_in_a_status(fuzzed: Fuzzed, seed: int):
    draw, good = random.Random(seed), fuzzed.good
    # The first words right or wrong, the rest a mixture.
    frames = [good[0] if draw.random() < 0.7 else mutate(good[0], draw)]
    frames += [mutate(one, draw) if draw.random() < 0.6 else one for one in draw.choices(good[1:], k=draw.randrange(6))]
    fuzzed.stream(frames)


@given(frames=st.lists(st.binary(max_size=200), max_size=6))
@settings(max_examples=EXAMPLES, deadline=None)
def test_bytes_that_are_no_messages_end_in_a_status(fuzzed: Fuzzed, frames: list[bytes]):
    fuzzed.stream(frames)


async def test_orders_out_of_turn_are_refused():
    async with world() as (context, _, stranger):
        hello, *rest = sentences(context, stranger)
        for frames in ([rest[0]], [rest[-1], hello], [hello, hello]):
            code, text = await answered(context.endpoint, frames)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (code, text)
            assert text


async def test_a_body_of_the_future_is_refused_with_its_field():
    async with world() as (context, _, stranger):
        hello = sentences(context, stranger)[0]
        unknown = kv_transfer_service_pb2.ConnectRequest(src_incarnation=stranger.incarnation)
        unknown.messages.append(transfer_pb2.PeerMessage.FromString(b"\xfa\x7f\x02hi"))
        code, text = await answered(context.endpoint, [hello, unknown.SerializeToString()])
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "body" in text


async def test_memory_stays_bounded_under_many_bad_streams():
    async with world() as (context, _, stranger):
        good, draw = sentences(context, stranger), random.Random(1)

        async def many(count: int) -> int:
            for _ in range(count):
                await stream(context.endpoint, [good[0], *(mutate(one, draw) for one in good[1:])])
            gc.collect()
            return psutil.Process().memory_info().rss

        before = await many(100)
        after = await many(300)
        assert after - before < 32 << 20, f"{(after - before) >> 20} MiB more"
        assert context.hub.core.context.terms() == {}
