"""A router's client against real coordinators that come late, break off, restart and refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import coordinator_service_pb2_grpc, errors_pb2

from coord_support import Running, coordinator, instance, peer, start_coordinator, until
from isthmus_core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    IsthmusError,
    NoCapacity,
    RequestCancelled,
    StartError,
    Unreachable,
)
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.process import free_port
from isthmus_core.rpc import RpcServer
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.coordinator_messages import Placement
from isthmus_router.ports import PlacementRequest


def key(number: int, attempt: int = 0) -> RequestKey:
    return RequestKey(MIN_GLOBAL_ID + number, attempt)


@asynccontextmanager
async def connected(
    target: str, name: str = "router", start_timeout_s: float = 20.0
) -> AsyncGenerator[CoordinatorClient, None]:
    client = CoordinatorClient(target, name, None, start_timeout_s)
    await client.start()
    try:
        yield client
        assert client.open_placements == 0
    finally:
        await client.close()


async def place(
    client: CoordinatorClient, number: int, attempt: int = 0, *, model: str = "m", timeout_s: float = 20.0
) -> Placement:
    return await client.select(PlacementRequest(key(number, attempt), model, 4, 4), timeout_s)


async def served(client: CoordinatorClient) -> None:
    await until(client.served)


async def load(target: str) -> dict[str, int]:
    async with peer(target) as one:
        cluster = await one.cluster()
    assert cluster.open_requests == max([0, *(member.open_requests for member in cluster.members)])
    return {member.instance.instance_id: member.open_requests for member in cluster.members}


async def until_load(target: str, wanted: dict[str, int]) -> None:
    async with asyncio.timeout(20):
        while await load(target) != wanted:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def member(running: Running, name: str = "w0") -> AsyncGenerator[None, None]:
    async with peer(running.target) as one:
        await one.register(instance(name))
        yield


async def test_placements_come_and_go():
    async with coordinator() as running, member(running), connected(running.target) as client:
        assert client.ready
        await served(client)
        assert [(model.name, model.max_model_len) for model in client.served()] == [("m", 100)]
        placement = await place(client, 1)
        assert placement.context is None
        assert placement.generation.instance_id == "w0"
        assert placement.generation.endpoint == instance("w0").endpoint
        assert placement.generation.incarnation == instance("w0").incarnation
        assert await load(running.target) == {"w0": 1}
        client.finish(key(1))
        client.finish(key(1))
        client.finish(key(77))
        await until_load(running.target, {"w0": 0})
        await place(client, 1, attempt=1)
        client.finish(key(1, 1))
        await until_load(running.target, {"w0": 0})


async def test_refusals_come_back_typed():
    async with coordinator() as running, connected(running.target) as client:
        with pytest.raises(IsthmusError) as caught:
            await place(client, 1)
        assert isinstance(caught.value.detail, errors_pb2.NoCapacity)
        async with member(running):
            await served(client)
            with pytest.raises(IsthmusError) as caught:
                await place(client, 1, model="x")
            assert caught.value.code is grpc.StatusCode.NOT_FOUND
            assert caught.value.detail == errors_pb2.UnknownModel(model="x", known=["m"])
            await place(client, 1)
            with pytest.raises(DuplicateRequest):
                await place(client, 1)
            with pytest.raises(IsthmusError) as caught:
                await place(client, 1, attempt=1)
            assert caught.value.detail == errors_pb2.DuplicateRequest(request_id=key(1).request_id)
            async with connected(running.target, "other") as other:
                with pytest.raises(IsthmusError) as caught:
                    await place(other, 1)
                assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
            assert await load(running.target) == {"w0": 1}
            client.finish(key(1))


async def test_many_at_once_each_get_their_own_answer():
    async with coordinator() as running, member(running), member(running, "w1"), connected(running.target) as client:
        await until(client.served)
        placed = await asyncio.gather(*(place(client, number) for number in range(500)))
        assert {placement.generation.instance_id for placement in placed} == {"w0", "w1"}
        for number in range(500):
            client.finish(key(number))
        async with peer(running.target) as one, asyncio.timeout(20):
            while (await one.cluster()).open_requests:
                await asyncio.sleep(0.01)


async def test_a_coordinator_that_comes_late_is_waited_for():
    port = free_port()
    client = CoordinatorClient(f"127.0.0.1:{port}", "r", None, 30.0)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0.3)
    assert not starting.done()
    with pytest.raises(NoCapacity, match="no lease"):
        client.mint_id()
    running = await start_coordinator(port=port)
    await starting
    assert client.ready
    await client.close()
    assert not client.ready
    await running.stop()


async def test_an_absent_coordinator_is_a_start_error_with_the_reason():
    target = f"127.0.0.1:{free_port()}"
    client = CoordinatorClient(target, "r", None, 0.5)
    with pytest.raises(StartError, match=r"router\.start_timeout_s.*onnect") as caught:
        await client.start()
    assert target in str(caught.value)
    with pytest.raises(Unreachable):
        await place(client, 1)


async def test_a_server_that_is_no_coordinator_is_refused_at_once():
    server = RpcServer()
    await server.start("127.0.0.1:0")
    with pytest.raises(StartError, match="refuses"):
        await CoordinatorClient(f"127.0.0.1:{server.port}", "r", None, 60.0).start()
    await server.stop(0)


async def test_a_restart_keeps_what_is_open_and_the_id_bits():
    first = await start_coordinator(first=77)
    port, target = first.server.port, first.target
    async with connected(target) as client:
        async with member(first):
            await served(client)
            await place(client, 1)
            await place(client, 2)
            before = client.mint_id()
        await first.kill()
        await until(lambda: not client.ready)
        client.finish(key(2))  # while nobody listens
        ids = {before, *(client.mint_id() for _ in range(100))}
        waiting = asyncio.create_task(place(client, 3))
        second = await start_coordinator(port=port, grace_s=3600.0)
        async with member(second):
            # It may be asked before the instance is back, or after: both are answers of the new coordinator.
            (answer,) = await asyncio.gather(waiting, return_exceptions=True)
            if isinstance(answer, Placement):
                client.finish(key(3))
            else:
                assert isinstance(answer, IsthmusError)
                assert isinstance(answer.detail, errors_pb2.NoCapacity)
            await served(client)
            with pytest.raises(DuplicateRequest):
                await place(client, 1)
            await until_load(target, {"w0": 1})
            await place(client, 4)
            await until_load(target, {"w0": 2})
            ids |= {client.mint_id() for _ in range(100)}
            assert len(ids) == 201
            client.finish(key(1))
            client.finish(key(4))
            await until_load(target, {"w0": 0})
    await until(second.servicer.idle)
    await second.stop()


async def test_a_select_waits_for_the_next_stream_within_its_time():
    first = await start_coordinator()
    port = first.server.port
    async with connected(first.target) as client:
        await first.kill()
        await until(lambda: not client.ready)
        with pytest.raises(Unreachable, match="can not be reached"):
            await place(client, 1, timeout_s=0.05)
        waiting = asyncio.create_task(place(client, 2))
        given_up = asyncio.create_task(place(client, 3))
        await asyncio.sleep(0.05)
        given_up.cancel()
        second = await start_coordinator(port=port, grace_s=5.0)
        with pytest.raises(IsthmusError) as caught:
            await waiting
        assert isinstance(caught.value.detail, errors_pb2.NoCapacity)
        await until(lambda: client.ready)
    await second.stop()


async def test_cancelled_selects_hold_nothing_and_their_answers_belong_to_nobody():
    async with coordinator() as running, member(running), connected(running.target) as client:
        await served(client)
        for turn in range(60):
            task = asyncio.create_task(place(client, turn % 3))
            for _ in range(turn % 6):
                await asyncio.sleep(0.0002 * (turn % 5))
            if task.done():
                client.finish(key(turn % 3))
            task.cancel()
            if turn % 2:
                # The same id at once: this answer must be its own.
                await asyncio.gather(task, return_exceptions=True)
                assert (await place(client, turn % 3)).generation.instance_id == "w0"
                client.finish(key(turn % 3))
            else:
                done = (await asyncio.gather(task, return_exceptions=True))[0]
                if isinstance(done, Placement):
                    client.finish(key(turn % 3))
        assert client.open_placements == 0
        await until_load(running.target, {"w0": 0})


class Silent(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    """Welcomes, then says what it is told to say, or nothing."""

    def __init__(self, *answers: pb.RouteResponse, ttl_s: int = 10) -> None:
        self.answers, self.ttl_s = answers, ttl_s
        self.hellos: list[pb.RouteHello] = []
        self.seen: list[str | None] = []
        self.cut = asyncio.Event()
        self.welcome = asyncio.Event()
        self.welcome.set()
        self.status: tuple[grpc.StatusCode, str] | None = None

    async def Route(self, request_iterator, context):  # type: ignore[no-untyped-def]
        self.hellos.append((await context.read()).hello)
        if self.status is not None:
            await context.abort(*self.status)
        lease = pb.IdLease(node_id=len(self.hellos), process_id=1, base_ms=1000)
        if self.hellos[-1].HasField("lease"):
            lease = self.hellos[-1].lease
        lease.ttl.FromMilliseconds(int(self.ttl_s * 1000))
        await self.welcome.wait()
        await context.write(pb.RouteResponse(welcome=pb.RouteWelcome(lease=lease)))
        serving = asyncio.create_task(self.serve(context))
        cut = asyncio.create_task(self.cut.wait())
        await asyncio.wait([serving, cut], return_when=asyncio.FIRST_COMPLETED)
        self.cut.clear()
        if self.status is not None:
            await context.abort(*self.status)

    async def serve(self, context):  # type: ignore[no-untyped-def]
        while (message := await context.read()) is not grpc.aio.EOF:
            self.seen.append(message.WhichOneof("body"))
            for answer in self.answers:
                await context.write(answer)


@asynccontextmanager
async def silent(service: Silent) -> AsyncGenerator[str, None]:
    server = RpcServer()
    coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(service, server.server)
    await server.start("127.0.0.1:0")
    yield f"127.0.0.1:{server.port}"
    await server.stop(None)


async def test_no_answer_in_time():
    service = Silent()
    async with silent(service) as target, connected(target) as client:
        with pytest.raises(DeadlineExceeded):
            await place(client, 1, timeout_s=0.1)


async def test_closing_ends_what_waits():
    service = Silent()
    async with silent(service) as target:
        client = CoordinatorClient(target, "r")
        await client.start()
        waiting = asyncio.create_task(place(client, 1))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(RequestCancelled):
            await waiting
        assert client.open_placements == 0


async def test_an_answer_that_can_not_be_understood_ends_the_stream_not_the_client():
    broken = pb.RouteResponse(selected=pb.Selected(key={"request_id": key(1).request_id}))
    service = Silent(broken)
    async with silent(service) as target, connected(target) as client:
        waiting = asyncio.create_task(place(client, 1))
        await until(lambda: len(service.hellos) > 1)
        service.answers = (answer(1),)
        assert (await waiting).generation.instance_id == "g"
        client.finish(key(1))


def answer(number: int) -> pb.RouteResponse:
    named = pb.InstanceDescriptor(instance_id="g", endpoint="e:1", incarnation=b"i" * 16)
    return pb.RouteResponse(selected=pb.Selected(key={"request_id": key(number).request_id}, generation=named))


async def test_what_ends_during_hello_is_finished_after_it():
    service = Silent(answer(1))
    async with silent(service) as target, connected(target) as client:
        await place(client, 1)
        service.welcome.clear()
        service.cut.set()
        await until(lambda: len(service.hellos) == 2)
        assert [one.key.request_id for one in service.hellos[1].open] == [key(1).request_id]
        client.finish(key(1))
        service.welcome.set()
        await until(lambda: service.seen == ["select", "finish"])


async def test_an_answer_goes_to_the_select_it_was_made_for():
    async with coordinator() as running, member(running), member(running, "w1"), connected(running.target) as client:
        await until_load(running.target, {"w0": 0, "w1": 0})
        for _ in range(10):
            given_up = asyncio.create_task(place(client, 1))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            placement = await place(client, 1)
            assert (await load(running.target))[placement.generation.instance_id] == 1
            client.finish(key(1))
            await until_load(running.target, {"w0": 0, "w1": 0})


async def test_a_lease_that_lapsed_mints_nothing_and_is_not_presented():
    service = Silent(ttl_s=0.2)  # type: ignore[arg-type]
    async with silent(service) as target, connected(target) as client:
        before = client.mint_id()
        service.status = (grpc.StatusCode.UNAVAILABLE, "later")
        service.cut.set()
        await until(lambda: not client.ready)
        client.mint_id()  # still within its time
        await asyncio.sleep(0.25)
        with pytest.raises(NoCapacity, match="lapsed"):
            client.mint_id()
        await until(lambda: len(service.hellos) > 2)
        service.status = None
        await until(lambda: client.ready)
        assert not service.hellos[-1].HasField("lease")
        assert client.mint_id() != before


async def test_a_refused_lease_is_given_up_for_a_new_one():
    service = Silent()
    async with silent(service) as target, connected(target) as client:
        client.mint_id()
        service.status = (grpc.StatusCode.FAILED_PRECONDITION, "not yours")
        service.cut.set()
        await until(lambda: len(service.hellos) >= 3)
        service.status = None
        await until(lambda: client.ready)
        assert service.hellos[1].HasField("lease")
        assert service.hellos[1].lease.base_ms > 1000
        assert not service.hellos[2].HasField("lease")
        client.mint_id()


async def test_two_routers_mint_unique_ids_over_restarts():
    running = await start_coordinator()
    port, target = running.server.port, running.target
    ids: list[int] = []
    async with connected(target, "a") as one, connected(target, "b") as two:
        for _ in range(3):
            for _ in range(10_000):
                ids += (one.mint_id(), two.mint_id())
            await running.kill()
            await until(lambda: not one.ready and not two.ready)
            for _ in range(5_000):
                ids += (one.mint_id(), two.mint_id())
            running = await start_coordinator(port=port, grace_s=10.0)
            await until(lambda: one.ready and two.ready)
    assert len(ids) == len(set(ids)) == 90_000
    await running.stop()
