"""What routers and instances say wrongly ends their streams with a reason, and nothing else."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import errors_pb2

from coord_support import coordinator, ending, finish, instance, pair_report, peer, select
from isthmus_coordinator.server import Limits
from isthmus_coordinator.wire import instance_to_pb
from isthmus_core.errors import from_status_bytes
from isthmus_core.ids import MIN_GLOBAL_ID

ID = MIN_GLOBAL_ID + 1


def _hello(**changes: object) -> pb.RegisterRequest:
    described = instance_to_pb(instance("w0"))
    for field, value in changes.items():
        setattr(described, field, value)
    return pb.RegisterRequest(hello=pb.RegisterHello(instance=described))


UNKNOWN_BODY = b"\xfa\x07\x00"  # field 127, a body of the future

BAD_REGISTER = {
    "empty": ([pb.RegisterRequest()], "body"),
    "unknown body": ([pb.RegisterRequest.FromString(UNKNOWN_BODY)], "body"),
    "no hello": ([pb.RegisterRequest(draining=pb.Draining())], "hello"),
    "id": ([_hello(instance_id="a b")], "instance_id"),
    "incarnation": ([_hello(incarnation=b"short")], "incarnation"),
    "endpoint": ([_hello(endpoint="nowhere")], "endpoint"),
    "role": ([_hello(role=99)], "role"),
    "no role": ([_hello(role=0)], "role"),
    "model": ([_hello(model="")], "model"),
    "length": ([_hello(max_model_len=0)], "max_model_len"),
    "schema": ([_hello(schema_version=9)], "schema_version"),
    "second hello": ([_hello(), _hello()], "after hello"),
    "unknown later body": ([_hello(), pb.RegisterRequest.FromString(UNKNOWN_BODY)], "after hello"),
    "pair of no generation instance": ([_hello(), pair_report(instance("c0"))], "generation"),
    "pair state": ([_hello(), pair_report(instance("c0"), 0)], "pair.state"),
    "pair state of the future": ([_hello(), pair_report(instance("c0"), 77)], "pair.state"),
}


@pytest.mark.parametrize(("messages", "says"), BAD_REGISTER.values(), ids=BAD_REGISTER)
async def test_bad_register_messages_end_the_stream(messages: list[pb.RegisterRequest], says: str):
    async with coordinator() as running, peer(running.target) as client:
        call = client.stub.Register()
        for message in messages:
            await call.write(message)
        code, text = await ending(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert says in text
        trailing = dict(await call.trailing_metadata() or ())
        assert isinstance(from_status_bytes(trailing["grpc-status-details-bin"]).detail, errors_pb2.InvalidField)


def _route(**fields: object) -> pb.RouteRequest:
    return pb.RouteRequest(hello=pb.RouteHello(**{"router_id": "r", **fields}))  # type: ignore[arg-type]


BAD_ROUTE = {
    "empty": ([pb.RouteRequest()], "body"),
    "unknown body": ([pb.RouteRequest.FromString(UNKNOWN_BODY)], "body"),
    "no hello": ([select(ID)], "hello"),
    "no name": ([_route(router_id="")], "router_id"),
    "lease": ([_route(lease=pb.IdLease(node_id=999))], "lease"),
    "open id": ([_route(open=[pb.OpenPlacement(generation=pb.InstanceStart(incarnation=b"i" * 16))])], "request_id"),
    "open instance": ([_route(open=[pb.OpenPlacement(key=select(ID).select.key)])], "generation"),
    "second hello": ([_route(), _route()], "after hello"),
    "unknown later body": ([_route(), pb.RouteRequest.FromString(UNKNOWN_BODY)], "after hello"),
    "finish of a local id": ([_route(), finish(5)], "request_id"),
}


@pytest.mark.parametrize(("messages", "says"), BAD_ROUTE.values(), ids=BAD_ROUTE)
async def test_bad_route_messages_end_the_stream(messages: list[pb.RouteRequest], says: str):
    async with coordinator() as running, peer(running.target) as client:
        call = client.stub.Route()
        for message in messages:
            await call.write(message)
        code, text = await ending(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert says in text


async def test_bytes_that_are_no_message_do_not_disturb_the_service():
    async with coordinator() as running, peer(running.target) as client:
        raw = client.channel.stream_stream("/isthmus.v1.CoordinatorService/Route")()
        await raw.write(b"\xff\xff\xff")
        async with asyncio.timeout(20):
            assert await raw.code() is not grpc.StatusCode.OK
        assert (await client.cluster()).open_requests == 0


async def test_a_select_with_a_local_id_is_refused_and_the_stream_goes_on():
    async with coordinator() as running, peer(running.target) as client:
        await client.register(instance("w0"))
        router = await client.route()
        await router.receive("welcome")
        await router.receive("served")
        await router.send(select(5))
        assert from_status_bytes((await router.receive("select_failed")).status).code.name == "INVALID_ARGUMENT"
        await router.send(select(ID, model="x"))
        assert from_status_bytes((await router.receive("select_failed")).status).code.name == "NOT_FOUND"
        await router.send(select(ID))
        await router.receive("selected")
        await router.send(select(ID))
        assert from_status_bytes((await router.receive("select_failed")).status).code.name == "ALREADY_EXISTS"


async def test_a_stream_that_does_not_begin_is_ended():
    async with coordinator(limits=Limits(hello_s=0.05)) as running, peer(running.target) as client:
        for call in (client.stub.Register(), client.stub.Route()):
            async with asyncio.timeout(20):
                assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "Hello" in await call.details()
