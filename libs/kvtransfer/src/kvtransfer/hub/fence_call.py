"""A FenceWriter without a stream: one call to whoever answers at the endpoint, one at a time for each peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc.aio
from isthmus.v1 import kv_transfer_service_pb2_grpc

from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel
from kvtransfer.errors import WireError
from kvtransfer.wire import fence_answer_from_pb, fence_request_to_pb

if TYPE_CHECKING:
    from isthmus_core.config import TlsConfig
    from kvtransfer.messages import FenceAnswer, FenceWriter
    from kvtransfer.session.actions import PeerId

log = logging.getLogger(__name__)

# Less than the time after which a fence is asked for again.
TIMEOUT_S = 4.0


class FenceCalls:
    """Calls on one event loop. `answered(peer, answer)` gets what a hub can prove; silence is logged, the machine that
    wanted the fence asks again."""

    def __init__(self, asker: PeerId, tls: TlsConfig | None, answered: Callable[[PeerId, FenceAnswer], None]) -> None:
        self._asker, self._tls, self._answered = asker, tls, answered
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}

    def ask(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        """Asks unless the last question is still open."""
        if peer not in self._tasks:
            task = asyncio.create_task(self._ask(peer, endpoint, fence), name=f"kv-fence-{peer[0]}")
            self._tasks[peer] = task

    async def close(self) -> None:
        """Ends every call."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        channel = open_channel(endpoint, self._tls)
        try:
            stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
            request = fence_request_to_pb(peer[1], self._asker, fence)
            answer = fence_answer_from_pb(await stub.Fence(request, timeout=TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            log.warning("instance %s can not be asked to fence its writers: %s", peer[0], from_rpc_error(error))
        except WireError as error:
            log.warning("instance %s gave a malformed answer to Fence: %s", peer[0], error)
        else:
            self._answered(peer, answer)
        finally:
            del self._tasks[peer]
            await channel.close()
