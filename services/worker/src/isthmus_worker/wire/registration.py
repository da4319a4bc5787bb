"""What an instance tells the coordinator about itself, and what it hears of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.v1 import common_pb2, coordinator_service_pb2, kv_index_pb2

from isthmus_core.block_keys import Keying
from kvtransfer.hub.estimates import PairEstimate
from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import INCARNATION_BYTES, InstanceRole
from kvtransfer.wire import incompatibilities_to_pb

# Version of the schema this build speaks: 2 = follows orders and tells its reusable blocks.
SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """This instance as `isthmus.v1.InstanceDescriptor`. `keying`: None when it reuses no blocks."""

    instance_id: str
    incarnation: bytes
    endpoint: str
    role: InstanceRole
    model: str
    max_model_len: int
    tokens_per_block: int
    engine: str
    total_blocks: int
    keying: Keying | None = None
    possible_roles: tuple[InstanceRole, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Take no new work, finish what there is, exit. `deadline_s` None: as configured."""

    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class RoleOrder:
    """Finish the work of the present role, then take another. `deadline_s` None: as configured."""

    role: InstanceRole
    deadline_s: float | None


Order = DrainOrder | RoleOrder


@dataclass(frozen=True, slots=True)
class RoleView:
    """The role of this instance, the one that it is changing to, why it did not follow its last order."""

    role: InstanceRole
    changing_to: InstanceRole | None = None
    refused: str = ""


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
        possible_roles=[common_pb2.InstanceRole.Name(role.value) for role in description.possible_roles],
    )
    if (keying := description.keying) is not None:
        instance.keying.CopyFrom(
            kv_index_pb2.BlockKeying(
                weights_digest=keying.weights_digest,
                attention_digest=keying.attention_digest,
                kv_dtype=keying.kv_dtype,
                tokens_per_block=keying.tokens_per_block,
            )
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


def estimate_to_pb(estimate: PairEstimate) -> coordinator_service_pb2.RegisterRequest:
    """For the coordinator."""
    return coordinator_service_pb2.RegisterRequest(
        estimate=coordinator_service_pb2.PairEstimate(
            generation=coordinator_service_pb2.InstanceStart(
                instance_id=estimate.instance_id, incarnation=estimate.incarnation
            ),
            estimate=coordinator_service_pb2.TransferEstimate(
                fixed_s=estimate.fixed_s, s_per_token=estimate.s_per_token, path=estimate.path
            ),
        )
    )


def peers_from_pb(pb: coordinator_service_pb2.PeerSet, before: Sequence[ContextPeer] = ()) -> tuple[ContextPeer, ...]:
    """The complete list; `before`: the last one. Raises ValueError when a peer lacks a name, an endpoint or a whole
    incarnation, or is named twice."""
    peers = tuple(ContextPeer(one.instance_id, one.incarnation, one.endpoint) for one in pb.context_instances)
    for peer in peers:
        if not peer.instance_id or not peer.endpoint or len(peer.incarnation) != INCARNATION_BYTES:
            raise ValueError(f"incomplete: {peer}")
    if len({peer.instance_id for peer in peers}) != len(peers):
        raise ValueError("an instance is named twice")
    if not pb.changes:
        return peers
    gone = {*pb.left_instance_ids, *(peer.instance_id for peer in peers)}
    return (*(peer for peer in before if peer.instance_id not in gone), *peers)


def role_to_pb(view: RoleView) -> coordinator_service_pb2.RegisterRequest:
    """How far a change of role is."""
    report = coordinator_service_pb2.RoleReport(
        role=common_pb2.InstanceRole.Name(view.role.value),
        changing_to=common_pb2.InstanceRole.Name(0 if view.changing_to is None else view.changing_to.value),
        refused=view.refused,
    )
    return coordinator_service_pb2.RegisterRequest(role=report)


def drain_from_pb(pb: coordinator_service_pb2.DrainOrder) -> DrainOrder:
    """An order of the coordinator."""
    return DrainOrder(pb.deadline.ToNanoseconds() / 1e9 if pb.HasField("deadline") else None)


def set_role_from_pb(pb: coordinator_service_pb2.SetRoleOrder) -> RoleOrder:
    """An order of the coordinator. Raises ValueError for a role that this build does not know."""
    deadline_s = pb.deadline.ToNanoseconds() / 1e9 if pb.HasField("deadline") else None
    return RoleOrder(InstanceRole(pb.role), deadline_s)
