"""The border for people and tools: the cluster as GetCluster and WatchCluster tell it."""

from __future__ import annotations

from isthmus.v1 import common_pb2, coordinator_service_pb2, errors_pb2, worker_service_pb2

from isthmus_coordinator.cluster import MemberView, PairView
from isthmus_coordinator.pairs import Pair
from isthmus_coordinator.placement import Served
from isthmus_coordinator.watch import News
from isthmus_coordinator.wire import instance_to_pb
from isthmus_coordinator.wire_route import models_to_pb, served_to_pb


def cluster_to_pb(
    members: tuple[MemberView, ...], pairs: tuple[PairView, ...], served: tuple[Served, ...], open_requests: int
) -> coordinator_service_pb2.GetClusterResponse:
    """Everything, for people and tools."""
    return coordinator_service_pb2.GetClusterResponse(
        members=[member_to_pb(member) for member in members],
        pairs=[_pair_to_pb(pair) for pair in pairs],
        models=models_to_pb(served),
        open_requests=open_requests,
    )


def member_to_pb(view: MemberView) -> coordinator_service_pb2.ClusterMember:
    """One member."""
    load, member = view.load, view.member
    return coordinator_service_pb2.ClusterMember(
        instance=instance_to_pb(member.instance),
        load=worker_service_pb2.InstanceLoad(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            held_handoffs=load.held_handoffs,
            used_blocks=load.used_blocks,
            total_blocks=load.total_blocks,
            in_doubt_blocks=load.in_doubt_blocks,
            receive_credits=load.receive_credits,
        ),
        draining=member.draining,
        open_requests=view.open_requests,
        open_tokens=view.open_tokens,
        indexed_blocks=view.indexed_blocks,
        finished_requests=view.finished_requests,
        changing_to=common_pb2.InstanceRole.Name(0 if member.changing_to is None else member.changing_to.value),
        refused=member.refused,
    )


def _pair_to_pb(view: PairView) -> coordinator_service_pb2.ClusterPair:
    return coordinator_service_pb2.ClusterPair(
        context_instance_id=view.context_id,
        generation_instance_id=view.generation_id,
        state=coordinator_service_pb2.PairState.Name(view.pair.state.value),
        incompatibilities=[
            errors_pb2.Incompatibility(field=one.field, mine=one.mine, yours=one.yours, remedy=one.remedy)
            for one in view.pair.incompatibilities
        ],
        estimate=_estimate_to_pb(view.pair),
    )


def _estimate_to_pb(pair: Pair) -> coordinator_service_pb2.TransferEstimate | None:
    one = pair.estimate
    if one is None:
        return None
    return coordinator_service_pb2.TransferEstimate(fixed_s=one.fixed_s, s_per_token=one.s_per_token, path=one.path)


def news_to_pb(news: News, sequence: int, wants_keys: bool) -> coordinator_service_pb2.WatchClusterResponse:
    """One message of WatchCluster."""
    watched = coordinator_service_pb2.WatchedMember
    ready = coordinator_service_pb2.ReadyContexts
    return coordinator_service_pb2.WatchClusterResponse(
        sequence=sequence,
        complete=news.complete,
        members=[watched(number=number, member=member_to_pb(view)) for number, view in news.members],
        left=news.left,
        ready=[ready(generation=number, contexts=contexts) for number, contexts in news.ready],
        served=None if news.served is None else served_to_pb(news.served, wants_keys),
    )
