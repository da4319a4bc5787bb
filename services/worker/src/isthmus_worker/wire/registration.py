"""What an instance tells the coordinator about itself, and what it hears of its peers."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.v1 import common_pb2, coordinator_service_pb2

from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import INCARNATION_BYTES, InstanceRole
from kvtransfer.wire import incompatibilities_to_pb

# Version of the schema this build speaks.
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """This instance as `isthmus.v1.InstanceDescriptor`."""

    instance_id: str
    incarnation: bytes
    endpoint: str
    role: InstanceRole
    model: str
    max_model_len: int
    tokens_per_block: int
    engine: str
    total_blocks: int


@dataclass(frozen=True, slots=True)
class ContextPeer:
    """A context instance that a generation instance keeps a stream to."""

    instance_id: str
    incarnation: bytes
    endpoint: str


@dataclass(frozen=True, slots=True)
class PairView:
    """State of the stream to one context instance. `state`: value of `isthmus.v1.PairState`."""

    instance_id: str
    incarnation: bytes
    state: int
    incompatibilities: tuple[Incompatibility, ...] = ()


def hello_to_pb(description: InstanceDescription) -> coordinator_service_pb2.RegisterRequest:
    """First message of the stream."""
    instance = coordinator_service_pb2.InstanceDescriptor(
        instance_id=description.instance_id,
        incarnation=description.incarnation,
        endpoint=description.endpoint,
        role=common_pb2.InstanceRole.Name(description.role.value),
        model=description.model,
        max_model_len=description.max_model_len,
        tokens_per_block=description.tokens_per_block,
        engine=description.engine,
        schema_version=SCHEMA_VERSION,
        total_blocks=description.total_blocks,
    )
    return coordinator_service_pb2.RegisterRequest(hello=coordinator_service_pb2.RegisterHello(instance=instance))


def pair_to_pb(pair: PairView) -> coordinator_service_pb2.PairReport:
    """For the coordinator."""
    return coordinator_service_pb2.PairReport(
        context_instance_id=pair.instance_id,
        context_incarnation=pair.incarnation,
        state=coordinator_service_pb2.PairState.Name(pair.state),
        incompatibilities=incompatibilities_to_pb(pair.incompatibilities),
    )


def peers_from_pb(pb: coordinator_service_pb2.PeerSet) -> tuple[ContextPeer, ...]:
    """Raises ValueError when a peer lacks a name, an endpoint or a whole incarnation, or is named twice."""
    peers = tuple(ContextPeer(one.instance_id, one.incarnation, one.endpoint) for one in pb.context_instances)
    for peer in peers:
        if not peer.instance_id or not peer.endpoint or len(peer.incarnation) != INCARNATION_BYTES:
            raise ValueError(f"incomplete: {peer}")
    if len({peer.instance_id for peer in peers}) != len(peers):
        raise ValueError("an instance is named twice")
    return peers
