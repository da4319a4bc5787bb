"""The generation hub's end of one Connect stream: opened, pumped, opened again. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Protocol, TypeAlias

import grpc
import grpc.aio
from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc

from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel
from kvtransfer.errors import ProtocolError, WireError
from kvtransfer.hub.outbox import Outbox
from kvtransfer.session.actions import EndReason
from kvtransfer.wire import envelope_from_pb

if TYPE_CHECKING:
    from isthmus_core.config import TlsConfig
    from kvtransfer.control.generation import PeerAddress
    from kvtransfer.messages import Envelope
    from kvtransfer.session.actions import PeerId

log = logging.getLogger(__name__)

Request: TypeAlias = kv_transfer_service_pb2.ConnectRequest
Response: TypeAlias = kv_transfer_service_pb2.ConnectResponse
Call = grpc.aio.StreamStreamCall[Request, Response]

RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 2.0
# Settings do not change by themselves, but ranks may refuse a peer for reasons that pass.
RETRY_INCOMPATIBLE_S = 5.0
# After the last message of a stream that this side ends, the peer gets this long to read it.
LINGER_S = 1.0


class LinkEvents(Protocol):
    """What happens on a link. Called on the event loop; none waits. The outbox tells streams to one peer apart."""

    def link_opened(self, peer: PeerId, outbox: Outbox) -> None: ...

    def link_envelope(self, peer: PeerId, outbox: Outbox, envelope: Envelope) -> None: ...

    def link_closed(self, peer: PeerId, outbox: Outbox) -> None: ...

    def link_was_ready(self, peer: PeerId) -> bool: ...


class Link:
    """Keeps a stream to one context instance open until `stop`."""

    def __init__(self, address: PeerAddress, incarnation: bytes, events: LinkEvents, tls: TlsConfig | None) -> None:
        self._address, self._incarnation, self._events, self._tls = address, incarnation, events, tls
        self._peer = (address.instance_id, address.incarnation)
        self.task = asyncio.create_task(self._run(), name=f"kv-link-{address.instance_id}")

    def stop(self) -> asyncio.Task[None]:
        """Ends the stream; the returned task is over when it has ended."""
        self.task.cancel()
        return self.task

    async def _run(self) -> None:
        failures = 0
        channel = open_channel(self._address.endpoint, self._tls)
        try:
            while True:
                outbox = Outbox()
                was_ready = await self._stream(channel, outbox)
                failures = 0 if was_ready else failures + 1
                await asyncio.sleep(self._pause(outbox, failures))
        finally:
            await channel.close()

    def _pause(self, outbox: Outbox, failures: int) -> float:
        rejected = outbox.ended is not None and outbox.ended[0] in (EndReason.REJECTED, EndReason.UNNEEDED)
        longest = RETRY_INCOMPATIBLE_S if rejected else min(RETRY_LONGEST_S, RETRY_FIRST_S * 2 ** min(failures, 10))
        # Half to full: peers that lost the same hub do not come back in one moment.
        return longest * random.uniform(0.5, 1.0)

    async def _stream(self, channel: grpc.aio.Channel, outbox: Outbox) -> bool:
        """One stream from opening to its end. True when it was ready at some time."""
        call = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel).Connect()
        self._events.link_opened(self._peer, outbox)
        reader = asyncio.create_task(self._read(call, outbox))
        writer = asyncio.create_task(self._write(call, outbox))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if not reader.done():
                await asyncio.wait((reader,), timeout=LINGER_S)
        finally:
            was_ready = self._events.link_was_ready(self._peer)
            self._events.link_closed(self._peer, outbox)
            call.cancel()
            for task in (reader, writer):
                task.cancel()
            ends = await asyncio.gather(reader, writer, return_exceptions=True)
        for end in ends:
            self._explain(end, outbox)
        return was_ready

    async def _read(self, call: Call, outbox: Outbox) -> None:
        async for response in call:
            self._events.link_envelope(self._peer, outbox, envelope_from_pb(response))
            await outbox.gets_its_turn()

    async def _write(self, call: Call, outbox: Outbox) -> None:
        while await outbox.ready():
            request = Request(src_incarnation=self._incarnation)
            outbox.take(request)
            await call.write(request)
        await call.done_writing()

    def _explain(self, end: BaseException | None, outbox: Outbox) -> None:
        """Streams end for many good reasons; what the peer did wrong is said loudly, a bug is raised."""
        name = f"stream to {self._address.instance_id} at {self._address.endpoint}"
        match end:
            case None | asyncio.CancelledError() | asyncio.InvalidStateError():
                log.debug("%s ended: %s", name, outbox.ended)
            case grpc.aio.AioRpcError():
                log.info("%s ended: %s", name, from_rpc_error(end))
            case ProtocolError() | WireError():
                log.warning("%s ended, the peer broke the protocol: %s", name, end)
            case _:
                raise end
