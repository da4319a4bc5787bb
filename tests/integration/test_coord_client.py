"""A router's client against real coordinators that come late, break off, restart and refuse."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from isthmus.v1 import errors_pb2

from coord_client_support import connected, key, load, member, place, served, until_load
from coord_support import coordinator, instance, peer, start_coordinator, until
from isthmus_core.errors import (
    DuplicateRequest,
    IsthmusError,
    NoCapacity,
    StartError,
    Unreachable,
)
from isthmus_core.process import free_port
from isthmus_core.rpc import RpcServer
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.coordinator_messages import Placement


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
