"""A router's client against a coordinator that says what it should not, too late or nothing, and its leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import coordinator_service_pb2_grpc

from coord_client_support import connected, key, load, member, place, until_load
from coord_support import coordinator, start_coordinator, until
from isthmus_core.errors import (
    DeadlineExceeded,
    NoCapacity,
    RequestCancelled,
)
from isthmus_core.rpc import RpcServer
from isthmus_router.coordinator_client import CoordinatorClient


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
