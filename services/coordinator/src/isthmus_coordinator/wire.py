"""The border: protobuf to values and back. Raises InvalidRequest naming the field."""

from __future__ import annotations

import re

from isthmus.v1 import common_pb2, coordinator_service_pb2, kv_index_pb2, worker_service_pb2

from isthmus_coordinator.kv_stream import KvBatch
from isthmus_coordinator.membership import Instance, Load, Role, Start
from isthmus_coordinator.pairs import Estimate, Incompatibility, Pair, PairState
from isthmus_core.block_keys import KEY_BYTES, Keying
from isthmus_core.errors import InvalidRequest

# Version of the schema this build speaks; one version of difference either way works.
# 1: hello, load, pair, draining, peers. 2: orders to instances, KV events, roles that change.
SCHEMA_VERSION = 2
WITH_ORDERS = 2
INCARNATION_BYTES = 16
_NAME = re.compile(r"[A-Za-z0-9._-]{1,120}")
_ENDPOINT = re.compile(r"[!-~]{1,255}:[0-9]{1,5}")
_MAX_MODEL_NAME = 200
_LONGEST_S = 1e6
_MAX_REASON = 1000

RegisterResponse = coordinator_service_pb2.RegisterResponse


def require(good: bool, field: str, value: object, remedy: str) -> None:
    """Raise InvalidRequest unless `good`."""
    if not good:
        raise InvalidRequest(field, str(value), remedy)


def instance_from_pb(pb: coordinator_service_pb2.InstanceDescriptor) -> Instance:
    """Every field is required."""
    known = [role.value for role in Role]
    require(_NAME.fullmatch(pb.instance_id) is not None, "instance.instance_id", pb.instance_id, f"use {_NAME.pattern}")
    incarnation_from_pb(pb.incarnation, "instance.incarnation")
    require(_ENDPOINT.fullmatch(pb.endpoint) is not None, "instance.endpoint", pb.endpoint, "use host:port")
    require(pb.role in known, "instance.role", pb.role, f"use one of {[role.name for role in Role]}")
    require(0 < len(pb.model) <= _MAX_MODEL_NAME, "instance.model", pb.model, f"use 1 to {_MAX_MODEL_NAME} characters")
    for field in ("max_model_len", "tokens_per_block", "total_blocks"):
        require(getattr(pb, field) > 0, f"instance.{field}", 0, "use a positive number")
    require(
        abs(pb.schema_version - SCHEMA_VERSION) <= 1 and pb.schema_version > 0,
        "instance.schema_version",
        pb.schema_version,
        f"this coordinator speaks version {SCHEMA_VERSION}: use instances at most one version older or newer",
    )
    return Instance(
        instance_id=pb.instance_id,
        incarnation=pb.incarnation,
        endpoint=pb.endpoint,
        role=Role(pb.role),
        model=pb.model,
        max_model_len=pb.max_model_len,
        tokens_per_block=pb.tokens_per_block,
        engine=pb.engine,
        schema_version=pb.schema_version,
        total_blocks=pb.total_blocks,
        keying=keying_from_pb(pb.keying) if pb.HasField("keying") else None,
        possible_roles=frozenset(role_from_pb(role, "instance.possible_roles") for role in pb.possible_roles),
    )


def role_from_pb(value: int, field: str) -> Role:
    """A role."""
    require(value in [role.value for role in Role], field, value, f"use one of {[role.name for role in Role]}")
    return Role(value)


def keying_from_pb(pb: kv_index_pb2.BlockKeying) -> Keying:
    """How an instance names its blocks."""
    require(pb.tokens_per_block > 0, "instance.keying.tokens_per_block", 0, "use a positive number")
    return Keying(pb.weights_digest, pb.attention_digest, pb.kv_dtype, pb.tokens_per_block)


def keying_to_pb(keying: Keying) -> kv_index_pb2.BlockKeying:
    """For routers, which compute the keys."""
    return kv_index_pb2.BlockKeying(
        weights_digest=keying.weights_digest,
        attention_digest=keying.attention_digest,
        kv_dtype=keying.kv_dtype,
        tokens_per_block=keying.tokens_per_block,
    )


def incarnation_from_pb(value: bytes, field: str) -> bytes:
    """One start of an instance."""
    require(len(value) == INCARNATION_BYTES, field, value.hex(), f"use {INCARNATION_BYTES} bytes")
    return value


def load_from_pb(pb: worker_service_pb2.InstanceLoad) -> Load:
    """Any values."""
    return Load(
        running_requests=pb.running_requests,
        waiting_requests=pb.waiting_requests,
        held_handoffs=pb.held_handoffs,
        used_blocks=pb.used_blocks,
        total_blocks=pb.total_blocks,
        in_doubt_blocks=pb.in_doubt_blocks,
        receive_credits=pb.receive_credits,
    )


def pair_from_pb(pb: coordinator_service_pb2.PairReport) -> tuple[Start, Pair]:
    """The start of the context instance that a report is about, and what it says."""
    known = [state.value for state in PairState]
    require(pb.context_instance_id != "", "pair.context_instance_id", "", "name the context instance")
    require(pb.state in known, "pair.state", pb.state, f"use one of {[state.name for state in PairState]}")
    start = Start(pb.context_instance_id, incarnation_from_pb(pb.context_incarnation, "pair.context_incarnation"))
    reasons = tuple(Incompatibility(one.field, one.mine, one.yours, one.remedy) for one in pb.incompatibilities)
    estimate = _estimate_from_pb(pb.estimate, "pair.estimate") if pb.HasField("estimate") else None
    return start, Pair(PairState(pb.state), reasons, estimate)


def pair_estimate_from_pb(pb: coordinator_service_pb2.PairEstimate) -> tuple[Start, Estimate]:
    """The start of the generation instance that an estimate is about, and the estimate."""
    name = pb.generation.instance_id
    require(name != "", "estimate.generation.instance_id", "", "name the generation instance")
    start = Start(name, incarnation_from_pb(pb.generation.incarnation, "estimate.generation.incarnation"))
    return start, _estimate_from_pb(pb.estimate, "estimate.estimate")


def _estimate_from_pb(pb: coordinator_service_pb2.TransferEstimate, field: str) -> Estimate:
    good = 0 <= pb.fixed_s < _LONGEST_S and 0 <= pb.s_per_token < _LONGEST_S  # NaN is not
    require(good, field, (pb.fixed_s, pb.s_per_token), f"use seconds in [0, {_LONGEST_S:g})")
    return Estimate(pb.fixed_s, pb.s_per_token, pb.path)


def instance_to_pb(instance: Instance) -> coordinator_service_pb2.InstanceDescriptor:
    """As routers and tools see it."""
    return coordinator_service_pb2.InstanceDescriptor(
        instance_id=instance.instance_id,
        incarnation=instance.incarnation,
        endpoint=instance.endpoint,
        role=common_pb2.InstanceRole.Name(instance.role.value),
        model=instance.model,
        max_model_len=instance.max_model_len,
        tokens_per_block=instance.tokens_per_block,
        engine=instance.engine,
        schema_version=instance.schema_version,
        total_blocks=instance.total_blocks,
        keying=None if instance.keying is None else keying_to_pb(instance.keying),
        possible_roles=[
            common_pb2.InstanceRole.Name(role.value) for role in sorted(instance.possible_roles, key=lambda r: r.value)
        ],
    )


def register_welcome() -> RegisterResponse:
    """Answer to an instance's Hello."""
    welcome = coordinator_service_pb2.RegisterWelcome(schema_version=SCHEMA_VERSION, takes_estimates=True)
    return RegisterResponse(welcome=welcome)


def peers_to_pb(before: tuple[Instance, ...] | None, peers: tuple[Instance, ...]) -> RegisterResponse:
    """The context instances: the complete list, or what has changed since `before`."""
    if before is None:
        every = [instance_to_pb(peer) for peer in peers]
        return RegisterResponse(peers=coordinator_service_pb2.PeerSet(context_instances=every))
    known, names = set(before), {peer.instance_id for peer in peers}
    new = [instance_to_pb(peer) for peer in peers if peer not in known]
    left = [peer.instance_id for peer in before if peer.instance_id not in names]
    return RegisterResponse(
        peers=coordinator_service_pb2.PeerSet(context_instances=new, changes=True, left_instance_ids=left)
    )


def role_report_from_pb(pb: coordinator_service_pb2.RoleReport) -> tuple[Role, Role | None, str]:
    """The role an instance has, the one that it is changing to, why it refused its last order."""
    changing_to = role_from_pb(pb.changing_to, "role.changing_to") if pb.changing_to else None
    return role_from_pb(pb.role, "role.role"), changing_to, pb.refused[:_MAX_REASON]


def kv_from_pb(pb: kv_index_pb2.KvEvents) -> KvBatch:
    """Changes of the reusable blocks."""
    for field, data in (("stored", pb.stored), ("removed", pb.removed)):
        require(len(data) % KEY_BYTES == 0, f"kv_events.{field}", f"{len(data)} bytes", "send 16-byte keys")
    return KvBatch(pb.sequence, pb.reset, pb.stored, pb.removed)


def snapshot_to_pb() -> RegisterResponse:
    """Tell all blocks."""
    return RegisterResponse(send_kv_snapshot=kv_index_pb2.SendKvSnapshot())


def drain_to_pb(deadline_s: float | None) -> RegisterResponse:
    """Finish and exit. Without a deadline the instance's own setting counts."""
    order = coordinator_service_pb2.DrainOrder()
    if deadline_s is not None:
        order.deadline.FromNanoseconds(int(deadline_s * 1e9))
    return RegisterResponse(drain=order)


def set_role_to_pb(role: Role, deadline_s: float | None) -> RegisterResponse:
    """Take another role. Without a deadline the instance's own setting counts."""
    order = coordinator_service_pb2.SetRoleOrder(role=common_pb2.InstanceRole.Name(role.value))
    if deadline_s is not None:
        order.deadline.FromNanoseconds(int(deadline_s * 1e9))
    return RegisterResponse(set_role=order)


def deadline_from_pb(pb: coordinator_service_pb2.DrainRequest | coordinator_service_pb2.SetRoleRequest) -> float | None:
    """Seconds; None when none is given."""
    if not pb.HasField("deadline"):
        return None
    seconds = pb.deadline.ToNanoseconds() / 1e9
    require(0 <= seconds <= _LONGEST_S, "deadline", seconds, f"use 0 to {_LONGEST_S:g} s")
    return seconds
