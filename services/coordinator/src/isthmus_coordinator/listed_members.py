"""Members that are listed: the coordinator comes to them (`coordinator.members`), again and again until it stops."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc
import grpc.aio
from isthmus.v1 import coordinator_service_pb2, member_service_pb2, member_service_pb2_grpc

from isthmus_coordinator import wire
from isthmus_coordinator.member_streams import MemberStreams
from isthmus_coordinator.membership import Instance, Role
from isthmus_coordinator.streams import pump, unexpected
from isthmus_core.config import TlsConfig
from isthmus_core.config_coordinator import MembersConfig
from isthmus_core.errors import ConfigError, DeadlineExceeded, InvalidRequest, IsthmusError, Unreachable, from_rpc_error
from isthmus_core.process import split_address
from isthmus_core.rpc import open_channel

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
_Call = grpc.aio.StreamStreamCall[member_service_pb2.EnlistRequest, member_service_pb2.EnlistResponse]


def listed_members(config: MembersConfig) -> dict[Role, tuple[str, ...]]:
    """Endpoints by role. Raises ConfigError for one that is no host:port or is listed twice."""
    listed: dict[Role, tuple[str, ...]] = {}
    seen: set[str] = set()
    for role in Role:
        field = f"coordinator.members.{role.name.lower()}"
        endpoints: list[str] = getattr(config, role.name.lower())
        for endpoint in endpoints:
            split_address(endpoint, field)
            if endpoint in seen:
                raise ConfigError(f"{field}: {endpoint} is listed twice; an instance has one role")
            seen.add(endpoint)
        listed[role] = tuple(endpoints)
    return listed


class ListedMembers:
    """A stream to every listed instance. One event loop owns it. `hello_s`: seconds that an instance may take to say
    who it is."""

    def __init__(
        self, listed: Mapping[Role, Sequence[str]], members: MemberStreams, tls: TlsConfig, hello_s: float
    ) -> None:
        self._listed, self._members, self._tls, self._hello_s = listed, members, tls, hello_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look for them."""
        self._tasks = [
            asyncio.create_task(self._keep(role, endpoint), name=f"member-{endpoint}")
            for role, endpoints in self._listed.items()
            for endpoint in endpoints
        ]

    async def close(self) -> None:
        """End every stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, role: Role, endpoint: str) -> None:
        backoff, said = _FIRST_BACKOFF_S, ""
        async with open_channel(endpoint, self._tls) as channel:
            stub = member_service_pb2_grpc.MemberServiceStub(channel)
            while True:
                welcomed, why = await self._one_stream(stub.Enlist(), role, endpoint)
                # The same reason every two seconds would bury everything else.
                logger.log(logging.DEBUG if why == said else logging.WARNING, "listed instance %s: %s", endpoint, why)
                said = why
                backoff = _FIRST_BACKOFF_S if welcomed else min(backoff * 2, _LONGEST_BACKOFF_S)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _one_stream(self, call: _Call, role: Role, endpoint: str) -> tuple[bool, str]:
        """One try, to the end of its stream: whether it made a member, and why it ended."""
        welcomed = False
        try:
            instance = await self._hello(call, role, endpoint)
            stream = self._members.open(instance)
            welcomed = True
            try:
                read, write = _reader(call), _writer(call)
                await pump(read, write, stream.outbox, lambda message: self._members.hear(stream, message))
            finally:
                self._members.close(stream)
        except grpc.aio.AioRpcError as error:
            return welcomed, from_rpc_error(error).message
        except IsthmusError as error:
            return welcomed, error.message
        finally:
            call.cancel()
        return welcomed, "it ended the stream"

    async def _hello(self, call: _Call, role: Role, endpoint: str) -> Instance:
        """Who lives at the endpoint. Raises IsthmusError or AioRpcError."""
        try:
            async with asyncio.timeout(self._hello_s):
                first = await _reader(call)()
        except TimeoutError:
            raise DeadlineExceeded("waiting for Hello", self._hello_s) from None
        body = None if first is None else first.WhichOneof("body")
        if first is None:
            raise Unreachable("it ended the stream before it said who it is")
        if body != "hello":
            raise unexpected(body, "send hello first")
        instance = wire.instance_from_pb(first.hello.instance)
        if role not in {instance.role, *instance.possible_roles}:
            field = f"coordinator.members.{role.name.lower()}"
            raise InvalidRequest(field, endpoint, f"list it under {instance.role.name.lower()}, which is its role")
        return instance


def _reader(call: _Call) -> Callable[[], Awaitable[coordinator_service_pb2.RegisterRequest | None]]:
    async def read() -> coordinator_service_pb2.RegisterRequest | None:
        message = await call.read()
        return message.message if isinstance(message, member_service_pb2.EnlistResponse) else None

    return read


def _writer(call: _Call) -> Callable[[wire.RegisterResponse], Awaitable[None]]:
    async def write(message: wire.RegisterResponse) -> None:
        await call.write(member_service_pb2.EnlistRequest(message=message))

    return write
