"""The coordinator over real gRPC: streams come, break and repeat themselves, and what the others are told."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import errors_pb2
from isthmus.v1.common_pb2 import TraceContext
from isthmus.v1.worker_service_pb2 import InstanceLoad
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coord_support import coordinator, finish, instance, pair_report, peer, select, start_coordinator, until
from isthmus_coordinator.server import Limits
from isthmus_coordinator.wire import instance_to_pb
from isthmus_core.errors import from_status_bytes
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.process import free_port
from isthmus_core.rpc import wait_serving
from isthmus_core.tracing import Tracing

ID = MIN_GLOBAL_ID + 1


def names(peers: pb.PeerSet) -> list[str]:
    return [one.instance_id for one in peers.context_instances]


def models(served: pb.ServedModels) -> dict[str, int]:
    return {model.name: model.max_model_len for model in served.models}


async def test_a_pair_becomes_a_served_model_and_a_placement_and_goes_again():
    c0, g0 = instance("c0"), instance("g0", length=60)
    async with coordinator() as running, peer(running.target) as client:
        router = await client.route()
        lease = (await router.receive("welcome")).lease
        assert lease.ttl.ToSeconds() == 10
        assert models(await router.receive("served")) == {}
        generation = await client.register(g0)
        assert names(await generation.receive("peers")) == []
        context = await client.register(c0)
        peers = await generation.receive("peers")
        assert peers.context_instances[0] == instance_to_pb(c0)
        await generation.send(pair_report(c0))
        assert models(await router.receive("served")) == {"m": 60}
        await router.send(select(ID))
        selected = await router.receive("selected")
        assert selected.key.request_id == ID
        assert selected.context == instance_to_pb(c0)
        assert selected.generation == instance_to_pb(g0)
        cluster = await client.cluster()
        assert [(m.instance.instance_id, m.open_requests) for m in cluster.members] == [("c0", 1), ("g0", 1)]
        assert cluster.open_requests == 1
        assert [pair.state for pair in cluster.pairs] == [pb.PAIR_STATE_READY]
        assert [model.name for model in cluster.models] == ["m"]
        await context.call.done_writing()
        assert await context.status() == (grpc.StatusCode.OK, "")
        assert names(await generation.receive("peers")) == []
        assert models(await router.receive("served")) == {}
        await router.send(select(ID + 1))
        failed = await router.receive("select_failed")
        assert failed.key.request_id == ID + 1
        error = from_status_bytes(failed.status)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert isinstance(error.detail, errors_pb2.NoCapacity)
        assert "0 context instances, 1 generation instance" in error.message
        await router.send(finish(ID))
        await until_open(client, 0)


async def until_open(client, count: int) -> pb.GetClusterResponse:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(20):
        while (cluster := await client.cluster()).open_requests != count:
            await asyncio.sleep(0.01)
    return cluster


async def test_a_killed_instance_is_no_member_any_more():
    async with coordinator() as running, peer(running.target) as client:
        router = await client.route()
        await router.receive("welcome")
        async with peer(running.target) as doomed:
            await doomed.register(instance("w0"))
            await router.receive_until("served", lambda served: models(served) == {"m": 100})
        await router.receive_until("served", lambda served: not served.models)
        assert not (await client.cluster()).members


async def test_a_broken_route_stream_releases_everything_of_that_router():
    async with coordinator() as running, peer(running.target) as client:
        await client.register(instance("w0"))
        other = await client.route("other")
        await other.receive("welcome")
        await other.receive("served")
        await other.send(select(ID))
        await other.receive("selected")
        async with peer(running.target) as doomed:
            router = await doomed.route("doomed")
            await router.receive("welcome")
            await router.receive("served")
            for number in range(1, 20):
                await router.send(select(ID + number))
                await router.receive("selected")
            assert (await client.cluster()).members[0].open_requests == 20
        assert (await until_open(client, 1)).members[0].open_requests == 1


async def test_the_newest_start_of_an_instance_wins():
    async with coordinator() as running, peer(running.target) as client:
        old = await client.register(instance("w0", 1))
        new = await client.register(instance("w0", 2))
        code, text = await old.status()
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "w0" in text
        (member,) = (await client.cluster()).members
        assert member.instance.incarnation == instance("w0", 2).incarnation
        with pytest.raises(AssertionError, match="ALREADY_EXISTS"):
            await client.register(instance("w0", 1))
        await new.send(pb.RegisterRequest(load=InstanceLoad(used_blocks=7)))
        async with asyncio.timeout(20):
            while (await client.cluster()).members[0].load.used_blocks != 7:
                await asyncio.sleep(0.01)


async def test_a_reconnected_instance_ends_what_is_left_of_its_stream():
    async with coordinator() as running, peer(running.target) as client:
        old = await client.register(instance("w0"))
        await client.register(instance("w0"))
        assert (await old.status())[0] is grpc.StatusCode.ABORTED
        assert len((await client.cluster()).members) == 1


async def test_a_draining_instance_is_shown_and_serves_nothing_new():
    async with coordinator() as running, peer(running.target) as client:
        stream = await client.register(instance("w0"))
        router = await client.route()
        await router.receive("welcome")
        await router.receive_until("served", lambda served: models(served) == {"m": 100})
        await stream.send(pb.RegisterRequest(draining=pb.Draining()))
        await router.receive_until("served", lambda served: not served.models)
        assert (await client.cluster()).members[0].draining


async def test_incompatible_pairs_are_listed_with_every_reason():
    c0 = instance("c0")
    reason = errors_pb2.Incompatibility(field="kv.dtype", mine="a", yours="b", remedy="use one")
    async with coordinator() as running, peer(running.target) as client:
        await client.register(c0)
        generation = await client.register(instance("g0"))
        await generation.receive_until("peers", names)
        await generation.send(pair_report(c0, pb.PAIR_STATE_INCOMPATIBLE, incompatibilities=[reason]))
        async with asyncio.timeout(20):
            while (pair := (await client.cluster()).pairs[0]).state != pb.PAIR_STATE_INCOMPATIBLE:
                await asyncio.sleep(0.01)
        assert list(pair.incompatibilities) == [reason]


async def test_a_router_that_does_not_read_is_ended_and_holds_nothing():
    limits = Limits(answers=100)
    async with coordinator(limits=limits) as running, peer(running.target) as client:
        await client.register(instance("w0"))
        async with peer(running.target) as slow:
            router = await slow.route("slow")
            await router.send(select(ID))
            await until_open(client, 1)
            for number in itertools.count(1):  # until the transport is full, and then the queue
                if running.servicer.open_streams == 1:
                    break
                await router.send(select(ID + number))
            code, text = await router.status()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "slow" in text
        assert (await client.cluster()).open_requests == 0
        healthy = await client.route("healthy")
        await healthy.receive("welcome")


async def test_a_reconnect_with_its_lease_takes_the_place_of_what_is_left_of_the_stream():
    async with coordinator() as running, peer(running.target) as client:
        await client.register(instance("w0"))
        old = await client.route("r")
        lease = (await old.receive("welcome")).lease
        await old.receive_until("served", lambda served: served.models)
        await old.send(select(ID))
        await old.receive("selected")
        new = await client.route("r", lease)
        again = (await new.receive("welcome")).lease
        assert (again.node_id, again.process_id) == (lease.node_id, lease.process_id)
        assert (await old.status())[0] is grpc.StatusCode.ABORTED
        assert (await client.cluster()).open_requests == 0
        thief = await client.route("thief", lease)
        assert (await thief.status())[0] is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_restarted_coordinator_takes_no_peers_away_before_they_can_be_back():
    c0 = instance("c0")
    async with coordinator(limits=Limits(settle_s=0.5)) as running, peer(running.target) as client:
        router = await client.route()
        await router.receive("welcome")
        generation = await client.register(instance("g0"))
        await generation.send(pair_report(c0))
        await asyncio.sleep(0.1)
        await client.register(c0)
        # Usable at once, on the word of the generation instance; the first list names what has come back.
        await router.receive_until("served", lambda served: models(served) == {"m": 100})
        assert names(await generation.receive("peers")) == ["c0"]


async def test_the_decision_is_a_span_of_the_request():
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "test", {})
    parent = TraceContext(trace_id=b"t" * 16, span_id=b"s" * 8, flags=1)
    async with coordinator(tracing=tracing) as running, peer(running.target) as client:
        await client.register(instance("w0"))
        router = await client.route()
        await router.receive("welcome")
        await router.receive_until("served", lambda served: served.models)
        for message in (select(ID), select(ID + 1, model="x")):
            message.select.trace.CopyFrom(parent)
            await router.send(message)
        await router.receive("selected")
        await router.receive("select_failed")
        await router.send(select(ID + 2))
        await router.receive("selected")
    await asyncio.to_thread(tracing.flush)
    assert tracing.open_spans() == 0
    placed, refused = exporter.get_finished_spans()  # the untraced one leaves none
    tracing.shutdown()
    for span in (placed, refused):
        assert span.name == "coordinator.route"
        assert span.parent is not None
        assert span.parent.span_id.to_bytes(8) == parent.span_id
        assert span.context.trace_id.to_bytes(16) == parent.trace_id
    assert placed.attributes is not None
    assert placed.attributes["isthmus.generation_instance"] == "w0"
    assert placed.attributes["isthmus.candidates"] == 1
    assert placed.attributes["isthmus.policy"] == "round_robin"
    assert "unknown model" in (refused.status.description or "")


async def test_health_and_reflection():
    async with coordinator() as running, peer(running.target) as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        for name in ("", "isthmus.v1.CoordinatorService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol="isthmus.v1.CoordinatorService")
        async for answer in stub.ServerReflectionInfo(iter([ask])):
            assert answer.file_descriptor_response.file_descriptor_proto


async def test_a_stopping_coordinator_ends_its_streams_with_a_reason():
    running = await start_coordinator()
    async with peer(running.target) as client:
        member = await client.register(instance("w0"))
        router = await client.route()
        await router.receive("welcome")
        await asyncio.gather(running.stop(), member.status(), router.status())
        for stream in (member, router):
            assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
    await until(running.servicer.idle)


def command(port: int) -> list[str]:
    return [sys.executable, "-m", "isthmus_coordinator", "--set", f"coordinator.listen=127.0.0.1:{port}"]


async def test_the_process_serves_and_leaves_on_sigterm_with_streams_open():
    port = free_port()
    process = subprocess.Popen(command(port), stderr=subprocess.PIPE, text=True)
    try:
        assert await wait_serving(f"127.0.0.1:{port}", 40, service="isthmus.v1.CoordinatorService")
        async with peer(f"127.0.0.1:{port}") as client:
            stream = await client.register(instance("w0"))
            os.kill(process.pid, signal.SIGTERM)
            assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(process.wait, 20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_taken_port_is_told_and_exit_code_3():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(command(port), capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 3
    assert f"coordinator.listen = 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
