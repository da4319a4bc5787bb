"""vLLM's event stream, read over a local socket."""

# pyright: basic, reportMissingImports=false
# ^ zmq and msgspec come with vLLM.

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_worker.engine import KvEvent
    from isthmus_worker.vllm_engine.block_keys import BlockKeys

logger = logging.getLogger(__name__)


class EventReader:
    """Follows the events at `endpoint` and emits what they mean for our keys. `failed` is told what ended it early."""

    def __init__(
        self,
        endpoint: str,
        keys: BlockKeys,
        emit: Callable[[KvEvent], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._endpoint, self._keys, self._emit, self._failed = endpoint, keys, emit, failed
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read(), name="vllm-events")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    async def close(self) -> None:
        """Read no longer."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        import msgspec
        import zmq
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        context = zmq.asyncio.Context()
        subscriber = context.socket(zmq.SUB)
        try:
            subscriber.setsockopt(zmq.RCVHWM, 0)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(self._endpoint)
            expected = None
            while True:
                _, number, payload = await subscriber.recv_multipart()
                sequence = int.from_bytes(number, "big")
                if expected is not None and sequence != expected:
                    logger.warning("vLLM dropped events %d to %d of its prefix cache", expected, sequence - 1)
                    self._say(self._keys.lost())
                expected = sequence + 1
                batch = decoder.decode(payload)
                self._say(self._keys.apply([_mapping(event) for event in batch.events]))
        finally:
            subscriber.close(linger=0)
            context.term()

    def _say(self, event: KvEvent | None) -> None:
        if event is not None:
            self._emit(event)


def _mapping(event: Any) -> dict[str, Any]:
    return {"type": type(event).__name__, **{name: getattr(event, name) for name in event.__struct_fields__}}
