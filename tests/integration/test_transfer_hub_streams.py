"""Connect streams: negotiation, refusals with every reason, misbehaving peers, questions and spans."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import grpc
import pytest
from isthmus.v1 import common_pb2, kv_transfer_service_pb2, kv_transfer_service_pb2_grpc, transfer_pb2
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hub_world import Side, assert_hubs_idle, connect, key, until
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel
from isthmus_core.tracing import TraceContext, Tracing
from kv_storage import Shape, instance
from kvtransfer import tracing as names
from kvtransfer import wire
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.control.negotiation import Dialect
from kvtransfer.hub import PairState
from kvtransfer.messages import Capability, Hello, Ping, TransferLimits
from kvtransfer.ports import TransferFailure
from kvtransfer.rank_info import InstanceRole, ModelFingerprint

pytestmark = pytest.mark.integration

Request, Response = kv_transfer_service_pb2.ConnectRequest, kv_transfer_service_pb2.ConnectResponse


class Sides:
    """Starts sides and stops them at the end of the test."""

    def __init__(self) -> None:
        self.fabric, self.all = LoopbackFabric(), list[Side]()

    async def __call__(self, name: str, role: InstanceRole, **settings) -> Side:
        side = Side(name, role, self.fabric, **settings)
        await side.start()
        self.all.append(side)
        return side


@pytest.fixture
async def sides() -> AsyncIterator[Sides]:
    sides = Sides()
    yield sides
    for side in reversed(sides.all):
        await side.stop()


async def context_of(sides: Sides, **settings) -> Side:
    return await sides("context-0", InstanceRole.CONTEXT, **settings)


async def generation_of(sides: Sides, **settings) -> Side:
    return await sides("generation-0", InstanceRole.GENERATION, **settings)


async def test_incompatible_pair_is_refused_with_every_reason(sides: Sides):
    context = await context_of(sides, dialect=Dialect(protocol_version=3, min_protocol_version=2))
    model = ModelFingerprint(b"x" * 16, b"a" * 16, "BF16")
    generation = await generation_of(
        sides,
        model=model,
        shape=Shape(unit=24),
        dialect=Dialect(protocol_version=1, required_features=("packed-kv",)),
    )
    generation.hub.set_context_peers([context.address])
    await until(lambda: generation.hub.pairs()[0].state is PairState.INCOMPATIBLE)
    (pair,) = generation.hub.pairs()
    reasons = {reason.field: reason for reason in pair.incompatibilities}
    assert {"protocol_version", "required_features.packed-kv", "model.weights_digest", "model.kv_dtype"} <= set(reasons)
    assert any("page_table" in field for field in reasons)
    assert (reasons["model.kv_dtype"].mine, reasons["model.kv_dtype"].yours) == ("BF16", "F32")
    assert (reasons["protocol_version"].mine, reasons["protocol_version"].yours) == ("1 to 1", "2 to 3")
    assert all(reason.remedy for reason in pair.incompatibilities)
    assert generation.pair_log[-1] == pair
    generation.ask(key(1), context.holder, 1)
    (outcome,) = generation.scheduler.check_gen_transfer_status()
    assert (outcome.settled, outcome.failure) == (True, TransferFailure.PEER_UNKNOWN)
    assert "incompatible" in outcome.reason
    assert_hubs_idle(sides.all)


async def test_two_contexts_are_no_pair(sides: Sides):
    context = await context_of(sides)
    other = await sides("context-1", InstanceRole.CONTEXT)
    other.hub.set_context_peers([context.address])
    await until(lambda: other.hub.pairs()[0].state is PairState.INCOMPATIBLE)
    assert {reason.field for reason in other.hub.pairs()[0].incompatibilities} == {"role"}


async def test_effective_limits_are_the_smaller_ones(sides: Sides):
    context = await context_of(sides, max_open_requests=1)
    generation = await generation_of(sides, max_block_ids=2)
    await connect(generation, context)
    context.agent.hold = True
    for number in (1, 2):
        context.offer(key(number), number)
        generation.ask(key(number), context.holder, number)
    generation.ask(key(3), context.holder, 5, 6, 7)
    outcomes = {one.key: one for one in generation.scheduler.check_gen_transfer_status()}
    assert "takes 1" in outcomes[key(2)].reason
    assert "at most 2 at once" in outcomes[key(3)].reason
    assert all(one.settled for one in outcomes.values())
    await until(lambda: sides.fabric.in_flight)
    sides.fabric.land()
    context.scheduler.cancel_request(key(2))
    await until(lambda: context.hub.is_idle() and generation.hub.is_idle())


async def test_without_reconcile_a_broken_stream_leaves_doubt_to_the_notice(sides: Sides):
    context = await context_of(sides, dialect=Dialect(capabilities=frozenset()))
    generation = await generation_of(sides)
    assert Capability.RECONCILE in Dialect().capabilities
    await connect(generation, context)
    context.agent.hold = True
    context.offer(key(1), 1)
    generation.ask(key(1), context.holder, 2)
    await until(lambda: sides.fabric.in_flight)
    await context.sever()
    await until(generation.hub.in_doubt_pages)
    await context.restore()
    await until(lambda: generation.hub.pairs()[0].state is PairState.READY)
    assert generation.hub.in_doubt_pages() == 1
    sides.fabric.land()
    await until(generation.hub.is_idle)


async def test_spans_tell_the_whole_transfer(sides: Sides):
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "test", {})
    context = await context_of(sides, tracing=tracing)
    generation = await generation_of(sides, tracing=tracing)
    await connect(generation, context)
    trace = TraceContext(os.urandom(16), os.urandom(8))
    context.offer(key(1), 1)
    generation.ask(key(1), context.holder, 2, trace=trace)
    await until(lambda: context.hub.is_idle() and generation.hub.is_idle())
    assert tracing.open_spans() == 0
    await asyncio.to_thread(tracing.shutdown)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    receive, transfer = spans[names.RECEIVE_SPAN], spans[names.TRANSFER_SPAN]
    assert receive.parent is not None
    assert receive.parent.span_id == int.from_bytes(trace.span_id)
    assert transfer.parent is not None
    assert transfer.parent.span_id == receive.context.span_id
    assert transfer.attributes is not None
    assert transfer.attributes[names.BYTES] == context.storage.slot
    assert transfer.attributes[names.DESCRIPTORS] == 1
    assert transfer.attributes[names.PATH] == "loopback"
    assert transfer.attributes[names.OUTCOME] == "delivered"
    assert transfer.attributes[names.PEER_INCARNATION] == generation.incarnation.hex()
    assert {names.QUEUE_MS, names.PLAN_MS, names.POST_MS, names.WIRE_MS} <= set(transfer.attributes)


# --- questions


async def test_questions_about_an_instance(sides: Sides):
    context = await context_of(sides, total_blocks=10)
    context.offer(key(1), 1, 2)
    channel = open_channel(context.endpoint)
    try:
        stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
        info = await stub.GetInstanceInfo(kv_transfer_service_pb2.GetInstanceInfoRequest())
        assert wire.instance_info_from_pb(info.instance).instance_id == "context-0"
        listed = await stub.ListSessions(kv_transfer_service_pb2.ListSessionsRequest())
    finally:
        await channel.close()
    (session,) = [wire.session_view_from_pb(one) for one in listed.sessions]
    assert (session.key, session.side, session.state, session.pages) == (key(1), InstanceRole.CONTEXT, "offered", 2)
    assert (listed.free_pages, listed.total_pages) == (8, 10)
    context.scheduler.cancel_request(key(1))
    await until(context.hub.is_idle)


async def test_hub_without_ranks_says_so(sides: Sides):
    context = await context_of(sides)
    context.hub._core = None
    channel = open_channel(context.endpoint)
    try:
        stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
        for call in (
            stub.GetInstanceInfo(kv_transfer_service_pb2.GetInstanceInfoRequest()),
            stub.ListSessions(kv_transfer_service_pb2.ListSessionsRequest()),
            stub.Connect(iter([Request()])).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call
            assert from_rpc_error(failure.value).code is grpc.StatusCode.UNAVAILABLE
    finally:
        await channel.close()
        context.hub._ticker.cancel()


# --- peers that misbehave


class Stranger:
    """A hand-made peer on a raw stream."""

    def __init__(self, context: Side, sides: Sides) -> None:
        self.context = context
        donor = Side("stranger", InstanceRole.GENERATION, sides.fabric)
        donor.rank.start()
        self.info = instance(donor.rank.info, role=InstanceRole.GENERATION, name="stranger")

    async def __aenter__(self) -> Stranger:
        self.channel = open_channel(self.context.endpoint)
        self.call = kv_transfer_service_pb2_grpc.KvTransferServiceStub(self.channel).Connect()
        return self

    async def __aexit__(self, *_) -> None:
        self.call.cancel()
        await self.channel.close()

    def hello(self, epoch: int = 1) -> Hello:
        limits = TransferLimits(8, 8)
        return Hello(1, 1, frozenset(Capability), limits, (), self.info, epoch)

    async def say(self, *bodies, src: bytes | None = None, dst: bytes = b"") -> None:
        messages = [wire.peer_message_to_pb(body) for body in bodies]
        src = self.info.incarnation if src is None else src
        await self.call.write(Request(src_incarnation=src, dst_incarnation=dst, messages=messages))

    async def hear(self) -> list[str]:
        response = await self.call.read()
        assert isinstance(response, Response)
        return [str(message.WhichOneof("body")) for message in response.messages]

    async def ended(self) -> grpc.StatusCode:
        while True:
            try:
                if await self.call.read() is grpc.aio.EOF:
                    return await self.call.code()
            except grpc.aio.AioRpcError as error:
                return error.code()


async def test_stream_that_does_not_greet_is_ended(sides: Sides):
    context = await context_of(sides)
    async with Stranger(context, sides) as stranger:
        await stranger.say(Ping(1))
        assert await stranger.ended() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("wrong", ["src", "dst"])
async def test_message_for_another_incarnation_ends_the_stream(sides: Sides, wrong: str):
    context = await context_of(sides)
    async with Stranger(context, sides) as stranger:
        await stranger.say(stranger.hello())
        assert await stranger.hear() == ["welcome"]
        await stranger.say(Ping(1), dst=context.incarnation)
        assert await stranger.hear() == ["pong"]
        if wrong == "src":
            await stranger.say(Ping(2), src=b"x" * 16, dst=context.incarnation)
        else:
            await stranger.say(Ping(2), dst=b"x" * 16)
        assert await stranger.ended() is grpc.StatusCode.INVALID_ARGUMENT


async def test_malformed_message_ends_the_stream_with_a_status(sides: Sides):
    context = await context_of(sides)
    async with Stranger(context, sides) as stranger:
        await stranger.say(stranger.hello())
        await stranger.hear()
        bad = transfer_pb2.PeerMessage(cancel=transfer_pb2.Cancel(key=common_pb2.RequestKey(request_id=7)))
        incarnations = {"src_incarnation": stranger.info.incarnation, "dst_incarnation": context.incarnation}
        await stranger.call.write(Request(messages=[bad], **incarnations))
        assert await stranger.ended() is grpc.StatusCode.INVALID_ARGUMENT


async def test_second_stream_of_one_peer_takes_over(sides: Sides):
    context = await context_of(sides)
    async with Stranger(context, sides) as first:
        await first.say(first.hello(epoch=1))
        assert await first.hear() == ["welcome"]
        second = Stranger(context, sides)
        second.info = first.info
        async with second:
            await second.say(second.hello(epoch=2))
            assert await second.hear() == ["welcome"]
            assert await first.ended() is grpc.StatusCode.ABORTED
            third = Stranger(context, sides)
            third.info = first.info
            async with third:
                # One that was overtaken on the way does not take over.
                await third.say(third.hello(epoch=1))
                assert await third.ended() is grpc.StatusCode.ABORTED
            await second.say(Ping(1), dst=context.incarnation)
            assert await second.hear() == ["pong"]


async def test_silent_peer_is_cut_off_but_not_dead(sides: Sides):
    context = await context_of(sides, ping_s=0.05)
    async with Stranger(context, sides) as stranger:
        await stranger.say(stranger.hello())
        assert await stranger.ended() is grpc.StatusCode.UNAVAILABLE
        assert context.hub.core.context.stream_of(("stranger", stranger.info.incarnation)) is None


async def test_failure_of_our_own_ends_the_stream(sides: Sides, monkeypatch: pytest.MonkeyPatch):
    context = await context_of(sides)

    def fail(*_) -> None:
        raise RuntimeError("a bug")

    async with Stranger(context, sides) as stranger:
        await stranger.say(stranger.hello())
        await stranger.hear()
        monkeypatch.setattr(context.hub, "stream_envelope", fail)
        await stranger.say(Ping(1), dst=context.incarnation)
        assert await stranger.ended() is grpc.StatusCode.UNKNOWN


async def test_failure_of_a_link_is_reported(sides: Sides, monkeypatch: pytest.MonkeyPatch):
    context, generation = await context_of(sides), await generation_of(sides)
    reported: list[BaseException] = []
    handler = lambda loop, report: reported.append(report["exception"])  # noqa: E731
    asyncio.get_running_loop().set_exception_handler(handler)

    def fail(*_) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(generation.hub, "link_envelope", fail)
    generation.hub.set_context_peers([context.address])
    await until(lambda: reported)
    assert str(reported[0]) == "a bug"
