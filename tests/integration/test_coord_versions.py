"""Instances of two schema versions in one cluster, and watchers of it."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1.kv_index_pb2 import KvEvents

from coord_support import Peer, RawStream, coordinator, finish, instance, pair_report, peer, select, until
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.membership import Instance, Role
from isthmus_coordinator.policies import Policy
from isthmus_core.block_keys import Keying, chain
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_router.cluster_watch import ClusterWatch

pytestmark = pytest.mark.integration

KEYING = Keying(b"w", b"a", "float32", 16)


def modern(name: str, start: int = 1) -> Instance:
    """An instance of this version, which reuses blocks and may change its role."""
    return replace(instance(name, start), schema_version=2, keying=KEYING, possible_roles=frozenset(Role))


async def join(client: Peer, one: Instance) -> RawStream:
    stream = await client.register(one)
    if one.keying is not None and one.schema_version > 1:
        await stream.receive("send_kv_snapshot")
    return stream


async def test_an_older_instance_is_placed_and_told_nothing_that_it_does_not_know():
    async with coordinator(cluster=Cluster(Policy.KV_AWARE)) as running, peer(running.target) as client:
        old, new = await client.register(instance("g0")), await join(client, modern("g1"))
        contexts = [modern("c0"), instance("c1")]
        streams = [await join(client, one) for one in contexts]
        for stream, changed in ((old, False), (new, True)):
            while True:  # the older one hears complete lists only
                peers = await stream.receive("peers")
                assert peers.changes <= changed
                if "c1" in {one.instance_id for one in peers.context_instances}:
                    break
            assert len(peers.context_instances) == 2 or changed
            for context in contexts:
                await stream.send(pair_report(context))
        router = await client.route()
        await router.receive("welcome")
        await until(lambda: running.servicer.open_streams == 5)
        served = await router.receive_until("served", lambda state: state.models)
        assert served.wants_prompt_keys
        assert [one.tokens_per_block for one in served.models[0].keyings] == [16]
        placed: set[str] = set()
        for number in range(8):
            await router.send(select(MIN_GLOBAL_ID + number))
            selected = await router.receive("selected")
            placed |= {selected.context.instance_id, selected.generation.instance_id}
        assert placed == {"c0", "c1", "g0", "g1"}
        for order in (client.stub.Drain(pb.DrainRequest(instance_id="g0")),):
            with pytest.raises(grpc.aio.AioRpcError, match="schema version 1"):
                await order
        await client.stub.Drain(pb.DrainRequest(instance_id="g1"))
        assert await new.receive("drain") is not None
        for stream in (*streams, old, new, router):
            stream.call.cancel()


async def test_blocks_are_asked_for_again_after_a_gap_and_lead_requests():
    async with coordinator(cluster=Cluster(Policy.KV_AWARE)) as running, peer(running.target) as client:
        w0, w1 = await join(client, modern("w0")), await join(client, modern("w1"))
        prompt = bytes(range(256))
        keys = chain(KEYING.root(b""), prompt, 16)
        await w1.send(pb.RegisterRequest(kv_events=KvEvents(sequence=1, reset=True, stored=keys[0])))
        await w1.send(pb.RegisterRequest(kv_events=KvEvents(sequence=3, stored=keys[1])))
        await w1.receive("send_kv_snapshot")
        await w1.send(pb.RegisterRequest(kv_events=KvEvents(sequence=1, reset=True, stored=b"".join(keys))))
        router = await client.route()
        await router.receive("welcome")
        await router.receive_until("served", lambda state: state.models)
        while True:
            request = select(MIN_GLOBAL_ID, prompt=64)
            request.select.prompt_keys.add(keying_id=KEYING.keying_id, keys=b"".join(keys))
            await router.send(request)
            selected = await router.receive("selected")
            await router.send(finish(MIN_GLOBAL_ID))
            if selected.context_cached_tokens:
                break
        assert selected.generation.instance_id == "w1"
        assert (selected.context_cached_tokens, selected.policy, selected.candidates) == (63, "kv_aware", 2)
        assert selected.kind == pb.PLACEMENT_KIND_UNSPLIT
        assert selected.scores[0].reuse == 63
        w1.call.cancel()
        await w0.send(pb.RegisterRequest(kv_events=KvEvents(sequence=1, reset=True, stored=b"x")))
        status = await w0.status()
        assert status[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert "kv_events.stored" in status[1]
        router.call.cancel()


async def test_watchers_see_members_loads_and_ready_pairs_come_and_go():
    async with coordinator() as running, peer(running.target) as client:
        watch = ClusterWatch(running.target)
        watch.start()
        await watch.known()
        assert watch.view.members() == []
        c0, g0 = modern("c0"), modern("g0")
        context, generation = await client.register(c0), await client.register(g0)
        await generation.receive_until("peers", lambda peers: peers.context_instances)
        await generation.send(pair_report(c0))
        await until(watch.view.ready_pairs)
        ((one, other),) = watch.view.ready_pairs()
        assert (one.instance_id, one.role, other.instance_id, other.role) == ("c0", "context", "g0", "generation")
        await context.send(pb.RegisterRequest(role=pb.RoleReport(role=1, changing_to=2)))  # type: ignore[arg-type]
        await until(lambda: not watch.view.ready_pairs())
        await context.send(pb.RegisterRequest(role=pb.RoleReport(role=2)))  # type: ignore[arg-type]
        await until(lambda: {one.role for one in watch.view.members()} == {"generation"})
        generation.call.cancel()
        await until(lambda: [one.instance_id for one in watch.view.members()] == ["c0"])
        context.call.cancel()
        await until(lambda: not watch.view.members())
        await watch.close()
