"""The one factory of gRPC channels and servers. Every hop uses it, so every hop has the same keepalive, message limits,
TLS and trace propagation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from isthmus_core.config import TlsConfig
from isthmus_core.errors import IsthmusError, StartError
from isthmus_core.process import prove_port_free, split_address
from isthmus_core.tls import RoleCheck, ServerCertificates, channel_credentials
from isthmus_core.tracing import TraceContext, parse_traceparent

# A prompt of a million tokens is 4 MB as bytes; a RankInfo of a large rank well under 1 MB.
MAX_MESSAGE_BYTES = 32 << 20

_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Half-open TCP connections are found within 30 s, also on idle streams.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS = [
    *_SHARED_OPTIONS,
    # Services are reached by exact address; a proxy from the environment must never sit in between.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long an attempt may take, whatever its name says: a busy server needs more than the first backoff.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_SERVER_OPTIONS = [
    *_SHARED_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
]


def open_channel(target: str, tls: TlsConfig | None = None) -> grpc.aio.Channel:
    """A channel to host:port. Own connection: channels are not shared behind the caller's back."""
    options = [*_CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    if tls is None or not tls.enabled:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, channel_credentials(tls), options=options)


class RpcServer:
    """A gRPC server with health and reflection. Services answer NOT_SERVING until `set_serving` says otherwise."""

    def __init__(
        self,
        tls: TlsConfig | None = None,
        *,
        share_port: bool = False,
        max_request_bytes: int = MAX_MESSAGE_BYTES,
        on_refused: Callable[[IsthmusError], None] = lambda _: None,
    ) -> None:
        """`share_port`: other processes of the same user, told the same, may listen on the port too (SO_REUSEPORT).
        `max_request_bytes`: larger messages are refused with RESOURCE_EXHAUSTED. `on_refused` hears of callers that
        have no role for what they call."""
        self._tls = tls
        self._share_port = share_port
        # Without this a second server binds a taken port silently and receives half of its connections.
        sharing = ("grpc.so_reuseport", int(share_port))
        largest = ("grpc.max_receive_message_length", max_request_bytes)
        options = [*(one for one in _SERVER_OPTIONS if one[0] != largest[0]), sharing, largest]
        checked = tls is not None and tls.enabled and tls.roles
        self.server = grpc.aio.server(options=options, interceptors=[RoleCheck(on_refused)] if checked else [])
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._names: list[str] = []
        self.port = 0

    def expose(self, file: FileDescriptor) -> None:
        """Make the services of a generated file known to reflection and health."""
        self._names.extend(service.full_name for service in file.services_by_name.values())

    async def start(self, address: str, field: str = "listen") -> int:
        """Bind host:port (0 = any free port) and serve. Returns the port. Raises StartError when it is taken."""
        host, port = split_address(address, field)
        if not self._share_port:
            prove_port_free(host, port, field)
        names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.server)
        await self.set_serving(False)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is not None and self._tls.enabled:
                self.port = self.server.add_secure_port(target, ServerCertificates(self._tls).credentials())
            else:
                self.port = self.server.add_insecure_port(target)
        except RuntimeError as error:
            raise StartError(f"{field} = {target}: {error}") from error
        await self.server.start()
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """What grpc.health.v1 answers for the server as a whole and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """NOT_SERVING at once, no new calls, running calls may take `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def outgoing_metadata(trace: TraceContext | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call made on behalf of `trace`."""
    return () if trace is None else (("traceparent", trace.to_traceparent()),)


def incoming_trace(context: grpc.aio.ServicerContext[Any, Any]) -> TraceContext | None:
    """Trace context of a call, None when there is none or it is malformed."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return parse_traceparent(value)
    return None


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: IsthmusError) -> NoReturn:
    """End the call with the error's code, message and typed detail."""
    metadata = (("grpc-status-details-bin", error.serialize()),)
    await context.abort(error.code, error.message, metadata)
    raise AssertionError("unreachable: abort raises")


async def wait_serving(target: str, timeout_s: float, *, service: str = "", tls: TlsConfig | None = None) -> bool:
    """True as soon as grpc.health.v1 at `target` answers SERVING; False when it has not after `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    channel = open_channel(target, tls)
    try:
        # A call by name: the health package's stub is typed without Watch.
        watch: Any = getattr(health_pb2_grpc.HealthStub(channel), "Watch")  # noqa: B009
        while (left := deadline - loop.time()) > 0:
            try:
                request = health_pb2.HealthCheckRequest(service=service)
                async for answer in watch(request, timeout=left, wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return True
            except grpc.aio.AioRpcError:
                await asyncio.sleep(min(0.1, left))  # not up yet, or restarted: watch again
        return False
    finally:
        await channel.close()
