"""Mutual TLS of every hop: credentials that follow their files, and callers that may do what their role may do."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from isthmus_core.config import TlsConfig
from isthmus_core.errors import ConfigError, IsthmusError
from isthmus_core.roles import Role, refusal, roles_of, who_may

logger = logging.getLogger(__name__)


def read_pem(tls: TlsConfig, name: str) -> bytes:
    """A file of the section. Raises ConfigError."""
    path = getattr(tls, name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{name} = {path}: {error.strerror}") from error


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """From the files as they are now: a channel that is opened later uses what is there then. Raises ConfigError."""
    return grpc.ssl_channel_credentials(read_pem(tls, "ca"), read_pem(tls, "key"), read_pem(tls, "cert"))


class ServerCertificates:
    """The certificate of a server, read again for the next connection when one of its files has changed.

    A file that can not be read, or is half written, changes nothing: the last good one stays, and the log says why.
    """

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._stamp = self._stamps()
        self._first = self._load()

    def credentials(self) -> grpc.ServerCredentials:
        """For `add_secure_port`. Raises ConfigError when the files do not make a certificate."""
        fetch: Any = self._fetch  # its stub knows no None, its documentation does
        return grpc.dynamic_ssl_server_credentials(self._first, fetch, require_client_authentication=True)

    def _stamps(self) -> tuple[int, ...]:
        paths = (self._tls.ca, self._tls.cert, self._tls.key)
        try:
            return tuple(path.stat().st_mtime_ns for path in paths if path is not None)
        except OSError:
            return ()

    def _load(self) -> grpc.ServerCertificateConfiguration:
        pair = (read_pem(self._tls, "key"), read_pem(self._tls, "cert"))
        return grpc.ssl_server_certificate_configuration([pair], read_pem(self._tls, "ca"))

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake; None = no change."""
        stamp = self._stamps()
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            fresh = self._load()
        except ConfigError as error:
            logger.warning("the certificate stays as it was: %s", error)
            return None
        logger.info("certificate files have changed: new connections use them")
        return fresh


class RoleCheck(grpc.aio.ServerInterceptor):
    """Refuses calls whose caller's certificate has no role for the method (PERMISSION_DENIED); tells `on_refused`."""

    def __init__(self, on_refused: Callable[[IsthmusError], None]) -> None:
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler: only it knows the peer."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if who_may(method) == frozenset(Role):
            return handler  # health and reflection
        if handler.request_streaming:
            kind = "stream_stream" if handler.response_streaming else "stream_unary"
        else:
            kind = "unary_stream" if handler.response_streaming else "unary_unary"
        inner = getattr(handler, kind)
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(self._checked(method, inner), handler.request_deserializer, handler.response_serializer)

    def _checked(self, method: str, inner: Any) -> Any:
        """The handler behind the check, of the kind it was: grpc.aio tells generators from coroutines by looking."""

        async def generates(request: Any, context: Any) -> Any:
            await self._check(method, context)
            async for one in inner(request, context):
                yield one

        async def returns(request: Any, context: Any) -> Any:
            await self._check(method, context)
            return await inner(request, context)

        return generates if inspect.isasyncgenfunction(inner) else returns

    async def _check(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        reason = refusal(method, roles_of(caller_names(context)))
        if reason is not None:
            logger.warning("refused a call of %s: %s", context.peer(), reason)
            self._on_refused(IsthmusError(reason, code=grpc.StatusCode.PERMISSION_DENIED))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, reason)


def caller_names(context: grpc.aio.ServicerContext[Any, Any]) -> Iterable[bytes]:
    """Subject alternative names of the caller's certificate; nothing without mutual TLS."""
    return context.auth_context().get("x509_subject_alternative_name", ())
