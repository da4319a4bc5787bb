"""Orders to instances by way of the coordinator."""

from __future__ import annotations

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_core.config import TlsConfig
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel

_TIMEOUT_S = 10.0


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


async def drain_instance(coordinator: str, instance_id: str, deadline_s: float | None, tls: TlsConfig | None) -> None:
    """Orders `instance_id` to finish its work and exit. Returns when the order is on its way. Raises IsthmusError."""
    request = coordinator_service_pb2.DrainRequest(instance_id=instance_id, deadline=_duration(deadline_s))
    async with open_channel(coordinator, tls) as channel:
        try:
            await coordinator_service_pb2_grpc.CoordinatorServiceStub(channel).Drain(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


async def set_role(
    coordinator: str, instance_id: str, role: str, deadline_s: float | None, tls: TlsConfig | None
) -> None:
    """Orders `instance_id` to take `role` (context, generation, context_and_generation). Raises IsthmusError."""
    request = coordinator_service_pb2.SetRoleRequest(
        instance_id=instance_id,
        role=f"INSTANCE_ROLE_{role.upper()}",
        deadline=_duration(deadline_s),
    )
    async with open_channel(coordinator, tls) as channel:
        try:
            await coordinator_service_pb2_grpc.CoordinatorServiceStub(channel).SetRole(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
