"""PlanTransfer and Probe of a real hub, and pairs that are measured before they may be used."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from isthmus.v1 import kv_transfer_service_pb2_grpc, transfer_tools_pb2

from hub_world import Side, connect, until
from isthmus_core.rpc import open_channel
from kv_storage import Shape
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.errors import AgentUnavailable
from kvtransfer.hub import PairState
from kvtransfer.rank_info import InstanceRole
from kvtransfer.transceiver.probing import ProbePolicy, host_scratch
from kvtransfer.wire import instance_info_to_pb

SCRATCH = 1 << 20


class Pair:
    """Two instances; every rank has scratch memory unless told otherwise."""

    def __init__(
        self,
        *,
        context: ProbePolicy | None = None,
        peer_scratch: bool = True,
        require_path: str = "",
        **shapes: Shape,
    ) -> None:
        self.keep = [host_scratch(SCRATCH), host_scratch(SCRATCH)]
        fabric, (near, far) = LoopbackFabric(), (region for region, _ in self.keep)
        policy = context or ProbePolicy()
        policy = ProbePolicy(near, policy.on_connect, policy.require_path)
        theirs = ProbePolicy(far) if peer_scratch else None
        self.context = Side("c", InstanceRole.CONTEXT, fabric, probing=policy)
        shape = shapes.get("shape")
        self.generation = Side(
            "g", InstanceRole.GENERATION, fabric, probing=theirs, shape=shape, require_path=require_path
        )

    async def __aenter__(self) -> Pair:
        await self.context.start()
        await self.generation.start()
        self.channels = [open_channel(side.endpoint) for side in (self.context, self.generation)]
        stubs = [kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel) for channel in self.channels]
        self.ask_context, self.ask_generation = stubs
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(channel.close() for channel in self.channels))
        await self.generation.stop()
        await self.context.stop()


async def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_a_probe_moves_real_bytes_and_names_the_path():
    async with Pair() as pair:
        await connect(pair.generation, pair.context)
        source, destination = (array for _, array in pair.keep)
        source[:] = 7
        answer = await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest())
        assert (destination == 7).all()
        (one,) = answer.pairs
        assert (answer.context_id, answer.generation_id) == ("c", "g")
        assert (one.src_rank, one.dst_rank, one.path, one.bytes, one.problem) == (0, 0, "loopback", SCRATCH, "")
        assert min(duration.nanos + duration.seconds for duration in (one.first, one.next, one.transfer)) > 0
        # The cache itself is untouched.
        assert (pair.generation.storage.memory == 0xEE).all()


async def test_a_probe_says_why_there_is_no_measurement():
    async with Pair(peer_scratch=False) as pair:
        await connect(pair.generation, pair.context)
        (one,) = (await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest())).pairs
        assert "rank 0 of g has no scratch memory" in one.problem


async def test_a_failed_write_is_reported_and_the_next_probe_works():
    async with Pair() as pair:
        await connect(pair.generation, pair.context)
        pair.context.agent.fail_next("cable")
        (one,) = (await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest())).pairs
        assert one.problem == "cable"
        (one,) = (await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest(bytes=4096))).pairs
        assert (one.problem, one.bytes) == ("", 4096)


async def test_probes_are_refused_where_nothing_can_be_measured():
    async with Pair() as pair:
        code, text = await refusal(pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest()))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "connected: none" in text
        await connect(pair.generation, pair.context)
        code, text = await refusal(pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest(instance_id="x")))
        assert "'x'" in text
        assert "connected: g" in text
        code, text = await refusal(pair.ask_generation.Probe(transfer_tools_pb2.ProbeRequest()))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "never writes" in text


async def test_a_plan_says_who_would_send_what():
    async with Pair() as pair:
        await connect(pair.generation, pair.context)
        question = transfer_tools_pb2.PlanTransferRequest(endpoint=pair.generation.endpoint, prompt_tokens=16)
        answer = await pair.ask_context.PlanTransfer(question)
        shape = pair.context.storage.shape
        assert answer.compatible
        assert answer.bytes == 4 * 2 * len(shape.layers) * shape.buffer
        (write,) = answer.writes
        assert (write.src_rank, write.dst_rank, write.bytes, write.path) == (0, 0, answer.bytes, "")
        assert not answer.HasField("expected")
        assert "c (one rank) -> g (one rank)" in answer.explanation
        # After a probe the way and the time are known too, and either side answers.
        await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest())
        answer = await pair.ask_context.PlanTransfer(question)
        assert answer.writes[0].path == "loopback"
        assert answer.expected.nanos > 0
        other = transfer_tools_pb2.PlanTransferRequest(endpoint=pair.context.endpoint, prompt_tokens=16)
        turned = await pair.ask_generation.PlanTransfer(other)
        assert (turned.context_id, turned.generation_id, turned.bytes) == ("c", "g", answer.bytes)


async def test_a_plan_for_a_pair_that_can_not_work_gives_every_reason():
    async with Pair(shape=Shape(layers=(0, 1, 2, 3), unit=8)) as pair:
        question = transfer_tools_pb2.PlanTransferRequest(instance=instance_info_to_pb(pair.generation.hub.instance))
        answer = await pair.ask_context.PlanTransfer(question)
        assert not answer.compatible
        assert answer.incompatibilities
        assert not answer.writes
        for reason in answer.incompatibilities:
            assert reason.field in answer.explanation


async def test_nonsense_is_refused():
    async with Pair() as pair:
        request = transfer_tools_pb2.PlanTransferRequest
        code, text = await refusal(pair.ask_context.PlanTransfer(request()))
        assert (code, "peer" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, _ = await refusal(pair.ask_context.PlanTransfer(request(endpoint="127.0.0.1:1")))
        assert code is grpc.StatusCode.UNAVAILABLE
        code, text = await refusal(pair.ask_context.PlanTransfer(request(endpoint="x:1", prompt_tokens=1 << 30)))
        assert (code, "prompt_tokens" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        question = request(instance=instance_info_to_pb(pair.generation.hub.instance))
        question.instance.ranks[0].page_table.regions[0].memory_kind = 99  # type: ignore[assignment]
        code, text = await refusal(pair.ask_context.PlanTransfer(question))
        assert (code, "memory_kind" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_connected_peer_is_not_asked_for_its_description_again(monkeypatch: pytest.MonkeyPatch):
    def nobody(*_: object) -> None:
        raise AssertionError("a call was made")

    async with Pair() as pair:
        await connect(pair.generation, pair.context)
        monkeypatch.setattr("kvtransfer.hub.tools.open_channel", nobody)
        for ask, other in ((pair.ask_context, pair.generation), (pair.ask_generation, pair.context)):
            question = transfer_tools_pb2.PlanTransferRequest(endpoint=other.endpoint, prompt_tokens=16)
            assert (await ask.PlanTransfer(question)).compatible


async def test_a_pair_is_measured_before_its_first_use():
    async with Pair(context=ProbePolicy(on_connect=True)) as pair:
        await connect(pair.generation, pair.context)
        question = transfer_tools_pb2.PlanTransferRequest(endpoint=pair.generation.endpoint, prompt_tokens=16)
        assert (await pair.ask_context.PlanTransfer(question)).writes[0].path == "loopback"


async def test_what_a_hand_off_takes_is_estimated_after_every_measurement():
    async with Pair(context=ProbePolicy(on_connect=True)) as pair:
        await connect(pair.generation, pair.context)
        await until(lambda: len(pair.context.estimates) == 1)
        await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest())
        await until(lambda: len(pair.context.estimates) == 2)
        newest = pair.context.estimates[-1]
        assert (newest.instance_id, newest.incarnation) == ("g", pair.generation.incarnation)
        assert newest.path == "loopback"
        question = transfer_tools_pb2.PlanTransferRequest(endpoint=pair.generation.endpoint, prompt_tokens=1024)
        (write,) = (await pair.ask_context.PlanTransfer(question)).writes
        planned = write.expected.seconds + write.expected.nanos / 1e9
        assert newest.fixed_s + 1024 * newest.s_per_token == pytest.approx(planned, rel=0.05, abs=1e-6)
        assert not pair.generation.estimates


async def test_without_a_measurement_nothing_is_estimated():
    async with Pair(peer_scratch=False, context=ProbePolicy(on_connect=True)) as pair:
        await connect(pair.generation, pair.context)
        await asyncio.sleep(0.2)
        assert not pair.context.estimates


@pytest.mark.parametrize("peer_scratch", [True, False])
async def test_a_pair_on_another_path_is_refused_with_both_values(monkeypatch, peer_scratch):
    async with Pair(peer_scratch=peer_scratch) as pair:
        # The way can only be wrong when the pair meets: at start this agent may still hope for it.
        peers = pair.context.rank._peers  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(peers, "_probing", ProbePolicy(pair.keep[0][0], require_path="cma"))
        pair.generation.hub.set_context_peers([pair.context.address])
        await until(lambda: any(one.state is PairState.INCOMPATIBLE for one in pair.generation.hub.pairs()))
        (status,) = pair.generation.hub.pairs()
        (reason,) = status.incompatibilities
        assert reason.field == "transfer.require_path"
        assert reason.yours == "cma"
        assert ("loopback" if peer_scratch else "no scratch memory") in reason.mine


@pytest.mark.parametrize("peer_scratch", [True, False])
async def test_a_generation_instance_that_requires_another_path_is_told_why_it_has_no_pair(peer_scratch: bool):
    """The context side measures for it, although it requires nothing itself."""
    async with Pair(peer_scratch=peer_scratch, require_path="cma") as pair:
        pair.generation.hub.set_context_peers([pair.context.address])
        await until(lambda: any(one.state is PairState.INCOMPATIBLE for one in pair.generation.hub.pairs()))
        (status,) = pair.generation.hub.pairs()
        (reason,) = status.incompatibilities
        assert (reason.field, reason.mine) == ("transfer.require_path", "cma")
        assert ("loopback" if peer_scratch else "no scratch memory") in reason.yours


async def test_a_generation_instance_that_requires_the_path_that_is_taken_gets_its_pair():
    async with Pair(require_path="loopback") as pair:
        await connect(pair.generation, pair.context)


async def test_an_instance_that_can_never_take_the_required_path_does_not_start():
    pair = Pair(context=ProbePolicy(require_path="cma"))
    with pytest.raises(AgentUnavailable, match=r"require_path = cma.*only take loopback"):
        pair.context.rank.start()


async def test_a_write_that_outlives_its_deadline_keeps_the_peer_loaded(monkeypatch):
    monkeypatch.setattr("kvtransfer.transceiver.probing.DEADLINE_S", 0.05)
    async with Pair() as pair:
        await connect(pair.generation, pair.context)
        pair.context.agent.hold = True
        (one,) = (await pair.ask_context.Probe(transfer_tools_pb2.ProbeRequest())).pairs
        assert "did not arrive within" in one.problem
        assert pair.context.rank.open_writes == 1
        pair.context.agent.hold = False
        pair.context.agent._fabric.land()
        await until(lambda: pair.context.rank.open_writes == 0)
