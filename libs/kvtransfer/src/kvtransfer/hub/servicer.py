"""KvTransferService on grpc.aio: messages in and out of the hub. Decides nothing; never waits for a transfer."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc, transfer_tools_pb2

from isthmus_core.errors import IsthmusError, Unreachable
from isthmus_core.rpc import abort_with
from kvtransfer.errors import ProtocolError, WireError
from kvtransfer.hub.outbox import Outbox
from kvtransfer.session.actions import EndReason
from kvtransfer.wire import (
    envelope_from_pb,
    fence_answer_to_pb,
    fence_request_from_pb,
    instance_info_to_pb,
    peer_view_to_pb,
    rehearse,
    session_view_to_pb,
)

if TYPE_CHECKING:
    from kvtransfer.hub.transfer_hub import TransferHub

log = logging.getLogger(__name__)

Request: TypeAlias = kv_transfer_service_pb2.ConnectRequest
Response: TypeAlias = kv_transfer_service_pb2.ConnectResponse
Context = grpc.aio.ServicerContext[Any, Any]

_CODES = {
    EndReason.PROTOCOL: grpc.StatusCode.INVALID_ARGUMENT,
    EndReason.REPLACED: grpc.StatusCode.ABORTED,
    EndReason.SILENT: grpc.StatusCode.UNAVAILABLE,
    EndReason.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class KvTransferServicer(kv_transfer_service_pb2_grpc.KvTransferServiceServicer):
    """Add with `add_KvTransferServiceServicer_to_server`."""

    def __init__(self, hub: TransferHub) -> None:
        self._hub = hub
        self._numbers = itertools.count(1)
        rehearse()

    async def Connect(self, request_iterator: AsyncIterator[Request], context: Context) -> AsyncIterator[Response]:
        """One generation instance's stream, until either side ends it."""
        await self._require_started(context)
        number, outbox = next(self._numbers), Outbox()
        self._hub.stream_opened(number, outbox)
        reader = asyncio.create_task(self._read(number, request_iterator, outbox))
        try:
            while await outbox.ready():
                response = Response(src_incarnation=self._hub.incarnation)
                outbox.take(response)
                yield response
        finally:
            self._hub.stream_closed(number)
            reader.cancel()
            (failure,) = await asyncio.gather(reader, return_exceptions=True)
        if isinstance(failure, Exception):
            raise failure
        if outbox.ended is not None and outbox.ended[0] in _CODES:
            reason, text = outbox.ended
            await abort_with(context, IsthmusError(text, code=_CODES[reason]))

    async def _read(self, number: int, requests: AsyncIterator[Request], outbox: Outbox) -> None:
        try:
            async for request in requests:
                self._hub.stream_envelope(number, envelope_from_pb(request))
                await outbox.gets_its_turn()
            outbox.end(EndReason.UNNEEDED, "the peer has ended the stream")
        except (ProtocolError, WireError, DecodeError) as error:
            log.warning("stream %d ended, the peer broke the protocol: %s", number, error)
            outbox.end(EndReason.PROTOCOL, str(error))
        except grpc.aio.BaseError as error:
            outbox.end(EndReason.UNNEEDED, f"the stream broke: {error}")
        finally:
            # After a failure of our own too: a stream that nobody reads must not stay open.
            outbox.end(EndReason.UNAVAILABLE, "this instance no longer reads the stream")

    async def GetInstanceInfo(
        self, request: kv_transfer_service_pb2.GetInstanceInfoRequest, context: Context
    ) -> kv_transfer_service_pb2.GetInstanceInfoResponse:
        """UNAVAILABLE until every rank has announced itself."""
        await self._require_started(context)
        return kv_transfer_service_pb2.GetInstanceInfoResponse(instance=instance_info_to_pb(self._hub.instance))

    async def ListSessions(
        self, request: kv_transfer_service_pb2.ListSessionsRequest, context: Context
    ) -> kv_transfer_service_pb2.ListSessionsResponse:
        """UNAVAILABLE until every rank has announced itself."""
        await self._require_started(context)
        status = self._hub.engine_status()
        return kv_transfer_service_pb2.ListSessionsResponse(
            sessions=[session_view_to_pb(view) for view in self._hub.sessions()],
            free_pages=status.free_pages,
            total_pages=status.total_pages,
            open_requests=status.open_requests,
            peers=[peer_view_to_pb(view) for view in self._hub.core.peers()],
            leaked_bytes=self._hub.core.receive.leaked_bytes,
        )

    async def Fence(
        self, request: kv_transfer_service_pb2.FenceRequest, context: Context
    ) -> kv_transfer_service_pb2.FenceResponse:
        """What is proven now; writers that are still at work are killed."""
        await self._require_started(context)
        try:
            incarnation, asker, fence = fence_request_from_pb(request)
        except WireError as error:
            await abort_with(context, IsthmusError(str(error), code=grpc.StatusCode.INVALID_ARGUMENT))
        return fence_answer_to_pb(self._hub.fence_asked(incarnation, asker, fence))

    async def PlanTransfer(
        self, request: transfer_tools_pb2.PlanTransferRequest, context: Context
    ) -> transfer_tools_pb2.PlanTransferResponse:
        """A dry run; changes nothing."""
        await self._require_started(context)
        try:
            return await self._hub.tools.plan(request)
        except IsthmusError as error:
            await abort_with(context, error)

    async def Probe(
        self, request: transfer_tools_pb2.ProbeRequest, context: Context
    ) -> transfer_tools_pb2.ProbeResponse:
        """Real bytes, between memory that holds nothing."""
        await self._require_started(context)
        try:
            return await self._hub.tools.probe(request)
        except IsthmusError as error:
            await abort_with(context, error)

    async def _require_started(self, context: Context) -> None:
        if not self._hub.started:
            await abort_with(context, Unreachable("the ranks of this instance are not ready yet; try again"))
