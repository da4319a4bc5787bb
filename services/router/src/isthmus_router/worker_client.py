"""Calls of workers over gRPC: one cached channel per incarnation of an instance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from isthmus.v1 import worker_service_pb2, worker_service_pb2_grpc

from isthmus_core.config import TlsConfig
from isthmus_core.errors import DeadlineExceeded, InternalError, IsthmusError, from_rpc_error
from isthmus_core.keys import RequestKey
from isthmus_core.rpc import open_channel, outgoing_metadata
from isthmus_core.tracing import TraceContext
from isthmus_router.ports import ConnectionLost, InstanceRef, Leg, LegEvent, Tokens, TookOver
from isthmus_router.worker_messages import to_event, to_key, to_request

logger = logging.getLogger(__name__)

# An abort is a courtesy to the context side, whose hold deadline frees the pages anyway.
ABORT_TIMEOUT_S = 2.0
# A channel that no call has used for this long is closed: its instance has most likely left.
IDLE_CHANNEL_S = 120.0

_Request = worker_service_pb2.WorkerServiceGenerateRequest
_Response = worker_service_pb2.WorkerServiceGenerateResponse
_Call = grpc.aio.UnaryStreamCall[_Request, _Response]


@dataclass(slots=True, eq=False)
class _Connection:
    channel: grpc.aio.Channel
    stub: worker_service_pb2_grpc.WorkerServiceStub
    calls: int = 0
    last_used: float = 0.0
    broken: bool = False


class WorkerClient:
    """Implements `ports.Workers`. One event loop owns it. `gather_s`: tokens of a leg may wait so long at the worker to
    come together."""

    def __init__(
        self, tls: TlsConfig | None = None, clock: Callable[[], float] = time.monotonic, gather_s: float = 0.0
    ) -> None:
        self._tls, self._gather_s = tls, gather_s
        self._clock = clock
        self._connections: dict[tuple[str, bytes], _Connection] = {}
        self._background: set[asyncio.Task[None]] = set()

    @property
    def open_channels(self) -> int:
        """Channels in the cache."""
        return len(self._connections)

    async def generate(
        self, instance: InstanceRef, leg: Leg, *, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[LegEvent | TookOver, None]:
        """Run a leg (contract: `ports.Workers.generate`)."""
        connection = self._acquire(instance)
        request = to_request(leg, self._gather_s)
        call = connection.stub.Generate(request, timeout=timeout_s, metadata=outgoing_metadata(trace))
        ended = False
        try:
            async for response in call:
                event = to_event(response, leg, instance)
                ended = not isinstance(event, Tokens | TookOver)
                yield event
                if ended:
                    return
            raise InternalError(f"instance {instance.instance_id} ended the leg of request {leg.key} without an end")
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, connection, instance, timeout_s) from error
        finally:
            if ended:
                # Cancelling now could look like a withdrawal of the pages that ContextReady has just announced.
                self._in_background(self._read_to_the_end(call, connection))
            else:
                call.cancel()
                self._release(connection)

    async def abort(self, instance: InstanceRef, key: RequestKey) -> None:
        """Withdraw a context leg (contract: `ports.Workers.abort`)."""
        connection = self._acquire(instance)
        request = worker_service_pb2.AbortRequest(key=to_key(key))
        try:
            await connection.stub.Abort(request, timeout=ABORT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, connection, instance, ABORT_TIMEOUT_S) from error
        finally:
            self._release(connection)

    async def close(self) -> None:
        """Close every channel; calls that run are cancelled."""
        connections = list(self._connections.values())
        self._connections.clear()
        await asyncio.gather(*(connection.channel.close() for connection in connections))
        while self._background:
            await asyncio.gather(*self._background)

    async def _read_to_the_end(self, call: _Call, connection: _Connection) -> None:
        try:
            async for _ in call:
                logger.warning("a worker sent more after the end of a leg; ignored")
        except grpc.aio.AioRpcError as error:
            logger.debug("a leg's call ended with %s after its last event", error.code().name)
        finally:
            self._release(connection)

    def _acquire(self, instance: InstanceRef) -> _Connection:
        now = self._clock()
        for key, connection in list(self._connections.items()):
            stale = key[0] == instance.endpoint and key[1] != instance.incarnation
            idle = connection.calls == 0 and now - connection.last_used > IDLE_CHANNEL_S
            if stale or idle:
                self._drop(key)
        key = (instance.endpoint, instance.incarnation)
        connection = self._connections.get(key)
        if connection is None:
            channel = open_channel(instance.endpoint, self._tls)
            connection = _Connection(channel, worker_service_pb2_grpc.WorkerServiceStub(channel))
            self._connections[key] = connection
        connection.calls += 1
        connection.last_used = now
        return connection

    def _release(self, connection: _Connection) -> None:
        connection.calls -= 1
        connection.last_used = self._clock()
        if connection.broken and connection.calls == 0:
            self._close(connection)

    def _drop(self, key: tuple[str, bytes]) -> None:
        """Take a connection out of the cache; it is closed when its last call has ended."""
        connection = self._connections.pop(key)
        connection.broken = True
        if connection.calls == 0:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._in_background(connection.channel.close())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _translate(
        self, error: grpc.aio.AioRpcError, connection: _Connection, instance: InstanceRef, timeout_s: float
    ) -> IsthmusError:
        typed = any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
        if typed:
            return from_rpc_error(error)
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"the call of instance {instance.instance_id}", timeout_s)
        # A server that is stopped hard cancels its calls; nobody else cancels one without a typed status.
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            key = (instance.endpoint, instance.incarnation)
            if self._connections.get(key) is connection:
                self._drop(key)
            return ConnectionLost(f"instance {instance.instance_id} at {instance.endpoint}: {error.details()}")
        return from_rpc_error(error)
