"""A gRPC service whose servicer exists only after its server has started."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from isthmus_core.errors import NoCapacity
from isthmus_core.rpc import abort_with


class LateService(grpc.GenericRpcHandler):
    """Add it to a server before that starts, then hand it to the generated `add_…Servicer_to_server` in place of the
    server. Calls in between are refused as UNAVAILABLE: try again."""

    def __init__(self, full_name: str) -> None:
        self._prefix = f"/{full_name}/"
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As `grpc.aio.Server`."""
        self._handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        """As `grpc.aio.Server`, which takes no such handlers once it runs; the generic ones serve the same methods."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call; None for other services."""
        if not handler_call_details.method.startswith(self._prefix):
            return None
        for handler in self._handlers:
            if (found := handler.service(handler_call_details)) is not None:
                return found
        return None if self._handlers else grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await abort_with(context, NoCapacity("the instance is starting: its engine is not ready yet"))
