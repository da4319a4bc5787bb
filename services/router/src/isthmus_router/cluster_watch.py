"""The cluster as the coordinator tells its watchers: members, loads and ready pairs, for policies that decide here."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import grpc.aio
from isthmus.v1 import coordinator_service_pb2 as pb
from isthmus.v1 import coordinator_service_pb2_grpc
from isthmus.v1.common_pb2 import InstanceRole

from isthmus_core.config import TlsConfig
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class WatchedMember:
    """A member. `role` as in worker.role; `usable`: it takes new work. The rest is its last report."""

    instance_id: str
    incarnation: bytes
    endpoint: str
    role: str
    model: str
    max_model_len: int
    usable: bool
    running_requests: int
    waiting_requests: int
    used_blocks: int
    total_blocks: int


class ClusterView:
    """Members and pairs by their numbers on one stream. Pure: messages in, state out."""

    def __init__(self) -> None:
        self._members: dict[int, WatchedMember] = {}
        self._ready: dict[int, tuple[int, ...]] = {}
        self._next = 1

    def take(self, message: pb.WatchClusterResponse) -> None:
        """Apply the next message. Raises ValueError when one is missing."""
        if message.sequence != self._next:
            raise ValueError(f"message {message.sequence} of the cluster's changes follows {self._next - 1}")
        self._next += 1
        for number in message.left:
            self._members.pop(number, None)
            self._ready.pop(number, None)
        for one in message.members:
            self._members[one.number] = _member(one.member)
        for one in message.ready:
            self._ready[one.generation] = tuple(one.contexts)

    def members(self) -> list[WatchedMember]:
        """All of them."""
        return list(self._members.values())

    def ready_pairs(self) -> list[tuple[WatchedMember, WatchedMember]]:
        """Context and generation instances that requests may use together now."""
        return [
            (context, generation)
            for number, contexts in self._ready.items()
            if (generation := self._members.get(number)) is not None and generation.usable
            for other in contexts
            if (context := self._members.get(other)) is not None and context.usable
        ]


class ClusterWatch:
    """A WatchCluster stream that is opened again whenever it breaks; what was known last stays until then."""

    def __init__(self, target: str, tls: TlsConfig | None = None) -> None:
        self._target, self._tls = target, tls
        self.view = ClusterView()
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="cluster-watch")

    async def known(self) -> None:
        """Returns once the cluster has been heard of."""
        await self._known.wait()

    async def close(self) -> None:
        """End the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        async with open_channel(self._target, self._tls) as channel:
            stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
            while True:
                view = ClusterView()
                try:
                    async for message in stub.WatchCluster(pb.WatchClusterRequest()):
                        view.take(message)
                        self.view, backoff = view, _FIRST_BACKOFF_S
                        self._known.set()
                except grpc.aio.AioRpcError as error:
                    logger.debug("watching coordinator %s: %s", self._target, from_rpc_error(error).message)
                except ValueError as error:
                    logger.warning("watching coordinator %s: %s", self._target, error)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, _LONGEST_BACKOFF_S)


def _member(pb_member: pb.ClusterMember) -> WatchedMember:
    one, load = pb_member.instance, pb_member.load
    return WatchedMember(
        instance_id=one.instance_id,
        incarnation=one.incarnation,
        endpoint=one.endpoint,
        role=InstanceRole.Name(one.role).removeprefix("INSTANCE_ROLE_").lower(),
        model=one.model,
        max_model_len=one.max_model_len,
        usable=not pb_member.draining and not pb_member.changing_to,
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
    )
