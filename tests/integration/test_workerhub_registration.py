"""Registration against a coordinator in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb

from fake_coordinator import FakeCoordinator, Response
from isthmus_core.errors import StartError
from isthmus_core.process import free_port
from isthmus_worker.engine import EngineLoad
from isthmus_worker.registration import Registration
from isthmus_worker.wire.registration import ContextPeer, InstanceDescription, PairView
from kvtransfer.hub import PairEstimate
from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration
ME = InstanceDescription("g-0", b"\1" * 16, "127.0.0.1:9", InstanceRole.GENERATION, "m", 64, 16, "fake", 100)
READY, INCOMPATIBLE = 2, 3


def peers(*names: str, incarnation: bytes = b"\2" * 16) -> Response:
    instances = [pb.InstanceDescriptor(instance_id=name, incarnation=incarnation, endpoint="h:1") for name in names]
    return Response(peers=pb.PeerSet(context_instances=instances))


async def test_hello_then_everything_that_changes():
    heard: asyncio.Queue[Sequence[ContextPeer]] = asyncio.Queue()
    async with FakeCoordinator() as coordinator:
        registration = Registration(coordinator.address, ME, on_peers=heard.put_nowait)
        await registration.start(30)
        assert registration.is_member
        hello = coordinator.said("hello")[0].instance
        assert (hello.instance_id, hello.endpoint, hello.model, hello.total_blocks) == ("g-0", "127.0.0.1:9", "m", 100)
        assert hello.role == 2
        assert hello.schema_version == 2
        coordinator.send(peers("c-0", "c-1"))
        assert [peer.instance_id for peer in await heard.get()] == ["c-0", "c-1"]
        reason = Incompatibility("model.kv_dtype", "F32", "BF16", "use one dtype")
        registration.set_pair(PairView("c-0", b"\2" * 16, READY))
        registration.set_pair(PairView("c-1", b"\2" * 16, INCOMPATIBLE, (reason,)))
        await coordinator.until(lambda: len(coordinator.said("pair")) == 2)
        by_name = {pair.context_instance_id: pair for pair in coordinator.said("pair")}
        assert by_name["c-0"].state == READY
        assert by_name["c-1"].incompatibilities[0].remedy == "use one dtype"
        registration.set_draining()
        await coordinator.until(lambda: len(coordinator.said("draining")) == 1)
        await registration.close()
        await coordinator.until(lambda: coordinator.open_streams == 0)


async def test_estimates_are_told_to_coordinators_that_take_them_and_again_after_a_restart():
    first, second = (PairEstimate("g-0", b"\2" * 16, seconds, 1e-6, "cma") for seconds in (0.5, 0.25))
    async with FakeCoordinator() as coordinator:
        registration = Registration(coordinator.address, replace(ME, role=InstanceRole.CONTEXT))
        await registration.start(30)
        registration.set_estimate(first)
        registration.set_pair(PairView("c-0", b"\2" * 16, READY))
        await coordinator.until(lambda: len(coordinator.said("pair")) == 1)
        assert coordinator.said("estimate") == []  # an older coordinator would end the stream for it
        port = coordinator.port
    async with FakeCoordinator(port) as coordinator:
        coordinator.welcome.takes_estimates = True
        await coordinator.until(lambda: len(coordinator.said("estimate")) == 1)
        registration.set_estimate(second)
        await coordinator.until(lambda: len(coordinator.said("estimate")) == 2)
        told = [one.estimate.fixed_s for one in coordinator.said("estimate")]
        assert told == [0.5, 0.25]
        assert coordinator.said("estimate")[0].generation.incarnation == b"\2" * 16
        await registration.close()


async def test_loads_are_told_when_they_change_and_not_too_often():
    async with FakeCoordinator() as coordinator:
        registration = Registration(coordinator.address, ME)
        await registration.start(30)
        for used in range(1, 200):
            registration.set_load(EngineLoad(used_blocks=used))
            await asyncio.sleep(0.002)
        await coordinator.until(lambda: coordinator.said("load")[-1].used_blocks == 199)
        assert len(coordinator.said("load")) < 40
        told = len(coordinator.said("load"))
        registration.set_load(EngineLoad(used_blocks=199))
        registration.set_pair(PairView("c-0", b"\2" * 16, READY))
        await coordinator.until(lambda: len(coordinator.said("pair")) == 1)
        assert len(coordinator.said("load")) == told
        await registration.close()


async def test_a_restarted_coordinator_is_told_everything_again():
    members: list[bool] = []
    async with FakeCoordinator() as first:
        registration = Registration(first.address, ME, on_member=members.append)
        await registration.start(30)
        first.send(peers("c-0"))
        registration.set_pair(PairView("c-0", b"\2" * 16, READY))
        registration.set_load(EngineLoad(used_blocks=7))
        await first.until(lambda: bool(first.said("pair") and first.said("load")[-1].used_blocks == 7))
    async with FakeCoordinator(first.port) as second:
        await second.until(lambda: bool(second.said("hello") and second.said("pair") and second.said("load")))
        assert second.said("load")[0].used_blocks == 7
        assert not second.said("draining")
        assert members == [True, False, True]
        await registration.close()


async def test_pairs_with_instances_that_have_left_are_not_told_again():
    heard: asyncio.Queue[Sequence[ContextPeer]] = asyncio.Queue()
    async with FakeCoordinator() as coordinator:
        registration = Registration(coordinator.address, ME, on_peers=heard.put_nowait)
        await registration.start(30)
        for name in ("c-0", "c-1"):
            registration.set_pair(PairView(name, b"\2" * 16, READY))
        coordinator.send(peers("c-1"))
        await heard.get()
        coordinator.send(None)
        await coordinator.until(lambda: len(coordinator.streams) == 2 and bool(coordinator.said("pair")))
        registration.set_draining()
        await coordinator.until(lambda: bool(coordinator.said("draining")))
        assert [pair.context_instance_id for pair in coordinator.said("pair")] == ["c-1"]
        await registration.close()


async def test_an_absent_coordinator_is_waited_for_and_then_named():
    address = f"127.0.0.1:{free_port()}"
    registration = Registration(address, ME)
    with pytest.raises(StartError, match=rf"{address} was not reached within 0\.5 s.*: .+"):
        await registration.start(0.5)
    await registration.close()


async def test_a_coordinator_that_comes_late_is_found():
    port = free_port()
    registration = Registration(f"127.0.0.1:{port}", ME)
    starting = asyncio.create_task(registration.start(30))
    await asyncio.sleep(0.3)
    async with FakeCoordinator(port):
        await starting
        assert registration.is_member
        await registration.close()


async def test_a_coordinator_that_says_nothing_is_no_member_ship(monkeypatch: pytest.MonkeyPatch):
    import isthmus_worker.registration as module

    monkeypatch.setattr(module, "_WELCOME_S", 0.1)
    async with FakeCoordinator() as coordinator:
        coordinator.mute = True
        registration = Registration(coordinator.address, ME)
        with pytest.raises(StartError, match="no welcome within"):
            await registration.start(0.7)
        assert len(coordinator.streams) > 1
        await registration.close()


async def test_a_refusal_is_final_at_once():
    async with FakeCoordinator() as coordinator:
        coordinator.refuse = grpc.StatusCode.FAILED_PRECONDITION
        registration = Registration(coordinator.address, ME)
        with pytest.raises(StartError, match="not you"):
            await registration.start(30)
        await registration.close()


async def test_a_member_that_is_replaced_does_not_fight_for_its_name():
    async with FakeCoordinator() as coordinator:
        registration = Registration(coordinator.address, ME)
        await registration.start(30)
        coordinator.send(grpc.StatusCode.ALREADY_EXISTS)
        assert "another incarnation" in await registration.refused
        assert not registration.is_member
        await asyncio.sleep(0.5)  # several times the first backoff
        assert len(coordinator.streams) == 1
        await registration.close()


@pytest.mark.parametrize("bad", [peers("c-0", incarnation=b"short"), peers("c-0", "c-0"), peers(""), Response()])
async def test_nonsense_of_the_coordinator_changes_no_peer(bad: Response):
    heard: list[Sequence[ContextPeer]] = []
    async with FakeCoordinator() as coordinator:
        registration = Registration(coordinator.address, ME, on_peers=heard.append)
        await registration.start(30)
        coordinator.send(bad)
        await coordinator.until(lambda: len(coordinator.streams) == 2 and bool(coordinator.said("hello")))
        assert heard == []
        await registration.close()
