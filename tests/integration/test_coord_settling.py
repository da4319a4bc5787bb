"""A coordinator that has just started: requests wait for instances that are on their way back."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb

from coord_support import Peer, RawStream, coordinator, finish, instance, peer, select
from isthmus_coordinator import held_selects
from isthmus_coordinator.server import Limits
from isthmus_core.errors import IsthmusError, from_status_bytes
from isthmus_core.ids import MIN_GLOBAL_ID

ID = MIN_GLOBAL_ID + 1
LONG = Limits(settle_s=60)


async def router(client: Peer) -> RawStream:
    """A Route stream, welcomed."""
    stream = await client.route()
    await stream.receive("welcome")
    return stream


async def refusal(stream: RawStream) -> IsthmusError:
    """What the next answer says."""
    return from_status_bytes((await stream.receive("select_failed")).status)


async def test_requests_wait_for_the_first_instance():
    async with coordinator(limits=LONG) as running, peer(running.target) as client:
        stream = await router(client)
        for number in range(3):
            await stream.send(select(ID + number))
        await client.register(instance("w1", model="other"))
        await stream.receive_until("served", lambda served: served.models)  # another model: not an answer
        await client.register(instance("w0"))
        keys = [(await stream.receive("selected")).key.request_id for _ in range(3)]
        assert keys == [ID, ID + 1, ID + 2]
        for number in range(3):
            await stream.send(finish(ID + number))


async def test_what_can_not_be_placed_in_time_is_refused_with_the_reason():
    async with coordinator(limits=Limits(settle_s=0.4)) as running, peer(running.target) as client:
        stream = await router(client)
        await stream.send(select(ID))
        error = await refusal(stream)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.message == "no instance has registered yet"
        await stream.send(select(ID + 1))  # settled: at once
        assert (await refusal(stream)).message == "no instance has registered yet"


async def test_one_that_is_given_up_is_answered_and_holds_nothing():
    async with coordinator(limits=LONG) as running, peer(running.target) as client:
        stream = await router(client)
        await stream.send(select(ID))
        await stream.send(select(ID))
        assert "is being served" in (await refusal(stream)).message
        await stream.send(finish(ID))
        assert (await refusal(stream)).code is grpc.StatusCode.CANCELLED
        await stream.send(select(ID + 1))  # left behind by its router
        await stream.call.done_writing()
        await stream.status()
        stream = await router(client)
        await client.register(instance("w0"))
        await stream.receive_until("served", lambda served: served.models)
        assert (await client.cluster()).open_requests == 0


async def test_an_excluded_instance_keeps_nobody_else_waiting():
    w0 = instance("w0")
    async with coordinator(limits=LONG) as running, peer(running.target) as client:
        stream = await router(client)
        first = select(ID)
        first.select.excluded_incarnations.append(w0.incarnation)
        await stream.send(first)
        await stream.send(select(ID + 1))
        await client.register(w0)
        assert (await stream.receive("selected")).key.request_id == ID + 1
        await client.register(instance("w1", start=2))
        assert (await stream.receive("selected")).generation.instance_id == "w1"
        await stream.send(finish(ID))
        await stream.send(finish(ID + 1))


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(held_selects, "MOST_HELD", 2)
    async with coordinator(limits=LONG) as running, peer(running.target) as client:
        stream = await router(client)
        for number in range(3):
            await stream.send(select(ID + number))
        assert "2 requests wait" in (await refusal(stream)).message


async def test_watchers_hear_nothing_before():
    async with coordinator(limits=Limits(settle_s=0.6)) as running, peer(running.target) as client:
        await client.register(instance("w0"))
        loop = asyncio.get_running_loop()
        began = loop.time()
        call = client.stub.WatchCluster(pb.WatchClusterRequest())
        async with asyncio.timeout(20):
            message: object = await call.read()
        assert loop.time() - began > 0.2  # what came sooner would have been incomplete
        assert isinstance(message, pb.WatchClusterResponse)
        assert message.complete
        assert [one.member.instance.instance_id for one in message.members] == ["w0"]
        call.cancel()
