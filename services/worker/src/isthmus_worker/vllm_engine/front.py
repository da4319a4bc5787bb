"""The front process: vLLM behind the frames of an engine process."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus_core.block_keys import root_key
from isthmus_core.errors import (
    InternalError,
    IsthmusError,
    Overloaded,
    RequestCancelled,
    StartError,
)
from isthmus_core.framing import AsyncFrameSocket
from isthmus_worker.engine import EngineDescription, EngineLoad, EngineRequest, LegReport, RequestType
from isthmus_worker.engine_process.frames import commands_from_bytes, events_to_bytes
from isthmus_worker.scheduler.events import RequestFinished, RequestReleased
from isthmus_worker.scheduler.limits import Limits
from isthmus_worker.vllm_engine.at_once import going_on
from isthmus_worker.vllm_engine.block_keys import BlockKeys
from isthmus_worker.vllm_engine.event_reader import EventReader
from isthmus_worker.vllm_engine.library import VllmLibrary
from isthmus_worker.vllm_engine.outputs import LegOutput
from isthmus_worker.vllm_engine.sampling import prompts
from isthmus_worker.vllm_engine.served import VllmServed
from isthmus_worker.wire.engine_frames import Abort, Stop
from kvtransfer.ports import FirstTokensArrived, ReceiveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from isthmus_core.config import IsthmusConfig
    from isthmus_core.keys import RequestKey
    from isthmus_worker.vllm_engine.model import ModelIdentity
    from isthmus_worker.vllm_engine.vllm_port import Vllm, VllmFacts

logger = logging.getLogger(__name__)

_NOTHING: tuple[None, dict[int, asyncio.Task[None]]] = (None, {})
# Load is told at most this often while there is work.
_LOAD_S = 0.2


class Front:
    """One engine. `run` serves the hub until it says stop or is gone."""

    def __init__(self, config: IsthmusConfig, identity: ModelIdentity, frames: AsyncFrameSocket) -> None:
        self._config, self._identity, self._frames = config, identity, frames
        self._legs: dict[RequestKey, asyncio.Task[None]] = {}
        # Of generation legs.
        self._generating: dict[RequestKey, tuple[LegOutput, dict[int, asyncio.Task[None]]]] = {}
        self._load = self._told = EngineLoad()
        self._pending: list[Any] = []
        self._engine: Vllm | None = None
        self._limits: Limits | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Raises StartError, and whatever ends vLLM."""
        with tempfile.TemporaryDirectory(prefix="isthmus-vllm-") as folder:
            endpoint = f"ipc://{Path(folder) / 'events'}"
            make = VllmServed if self._config.engine.serve else VllmLibrary
            engine = self._engine = make(self._config, self._identity, endpoint, self.note_load)
            try:
                await self._serve_hub(engine, endpoint, await engine.start())
            finally:
                await engine.close()

    async def _serve_hub(self, engine: Vllm, endpoint: str, facts: VllmFacts) -> None:
        description = self._describe(facts)
        events = EventReader(endpoint, self._block_keys(description), self._emit, self._end)
        if self._config.engine.prefix_caching:
            events.start()
        tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._tell_load(engine))]
        try:
            self._emit(description)
            done, _ = await asyncio.wait((*tasks, self._failed), return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for task in (*tasks, *self._legs.values()):
                task.cancel()
            await events.close()

    def _describe(self, facts: VllmFacts) -> EngineDescription:
        identity, wanted = self._identity, self._config.engine.vllm.get("block_size")
        if wanted is not None and wanted != facts.tokens_per_block:
            raise StartError(
                f"engine.vllm.block_size = {wanted}: vLLM made it {facts.tokens_per_block}; write that, or leave it out"
            )
        self._load = self._told = EngineLoad(total_blocks=facts.total_blocks)
        self._limits = Limits(
            role=self._config.worker.role,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            tokens_per_block=facts.tokens_per_block,
            num_blocks=facts.total_blocks,
            max_running=facts.max_running,
            max_batch_tokens=facts.max_model_len,  # vLLM cuts prompts itself
            max_waiting=self._config.engine.max_waiting,
            adapters=tuple(one.name for one in identity.adapters),
        )
        return EngineDescription(
            name="vllm",
            max_model_len=facts.max_model_len,
            tokens_per_block=facts.tokens_per_block,
            total_blocks=facts.total_blocks,
            vocab_size=facts.vocab_size,
            weights_digest=identity.weights_digest,
            attention_digest=identity.attention_digest,
            kv_dtype=facts.kv_dtype,
        )

    def _block_keys(self, description: EngineDescription) -> BlockKeys:
        def root(salt: bytes, adapter: str) -> bytes:
            return root_key(
                weights_digest=description.weights_digest,
                attention_digest=description.attention_digest,
                kv_dtype=description.kv_dtype,
                adapter=adapter,
                salt=salt,
            )

        return BlockKeys(root, description.tokens_per_block)

    # --- the hub

    async def _serve(self) -> None:
        while (frame := await self._frames.recv()) is not None:
            for command in commands_from_bytes(frame):
                match command:
                    case EngineRequest():
                        self._submit(command)
                    case Abort(key):
                        if key in self._legs:
                            self._legs[key].cancel()
                    case FirstTokensArrived():
                        self._drop_ended(command)
                    case ReceiveOutcome():
                        self._lost(command)
                    case Stop():
                        return
                    case _:
                        raise InternalError(f"{type(command).__name__} is for the scheduler of vLLM, not for its front")

    def _submit(self, request: EngineRequest) -> None:
        if request.key in self._legs:
            raise InternalError(f"the hub submitted request {request.key} while it is live")
        task = asyncio.create_task(self._run_leg(request), name=f"leg {request.key}")
        self._legs[request.key] = task
        task.add_done_callback(lambda done: self._over(request.key, done))

    def _over(self, key: RequestKey, task: asyncio.Task[None]) -> None:
        del self._legs[key]
        if task.cancelled():  # before it had begun
            self._emit(RequestFinished(key, RequestCancelled(), LegReport()))
            self._emit(RequestReleased(key))
        elif (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """vLLM can not go on: the process ends, and its hub says why."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _run_leg(self, request: EngineRequest) -> None:
        output = LegOutput(request)
        streams: dict[int, asyncio.Task[None]] = {}
        try:
            self._check(request)
            for answer, prompt in prompts(request).items():
                streams[answer] = asyncio.create_task(self._stream(request, output, answer, prompt))
            if request.request_type is RequestType.GENERATION_ONLY:
                self._generating[request.key] = output, streams
            await asyncio.gather(*streams.values())
        except asyncio.CancelledError:
            await _cancel(streams.values())
            self._emit(output.failed(output.lost or RequestCancelled()))
        except IsthmusError as error:
            await _cancel(streams.values())
            self._emit(output.failed(error))
        self._generating.pop(request.key, None)
        if not output.handed_off:
            # Otherwise the hub knows when its blocks are free.
            self._emit(RequestReleased(request.key))

    def _drop_ended(self, news: FirstTokensArrived) -> None:
        """Answers that their first tokens have ended are not computed."""
        output, streams = self._generating.get(news.key, _NOTHING)
        for answer in streams.keys() - going_on(news):
            if output is not None:
                for event in output.drop(answer):
                    self._emit(event)
            streams[answer].cancel()

    def _lost(self, outcome: ReceiveOutcome) -> None:
        """The cache does not come, and a peer may still write into the blocks, for as long as it takes: vLLM lets go of
        the request, which keeps them, and the prompt is computed in another one."""
        output, streams = self._generating.get(outcome.key, _NOTHING)
        if output is None or output.has_spoken:
            return
        output.lose(outcome.reason, recompute=self._config.transfer.on_transfer_failure == "recompute")
        if output.lost is not None:
            self._legs[outcome.key].cancel()
        else:
            for stream in streams.values():
                stream.cancel()

    async def _stream(self, request: EngineRequest, output: LegOutput, answer: int, ids: list[int]) -> None:
        """One answer. Raises IsthmusError."""
        name = f"{request.key.request_id}.{request.key.attempt}.{answer}"
        try:
            await self._generate(request, output, answer, ids, name)
        except asyncio.CancelledError:
            if output.is_dropped(answer):
                return
            if not output.alone:
                raise
            await self._generate(request, output, answer, ids, f"{name}.alone")

    async def _generate(
        self, request: EngineRequest, output: LegOutput, answer: int, ids: list[int], name: str
    ) -> None:
        """One request of vLLM."""
        if self._engine is None:
            raise InternalError("a request before the engine has started")
        async with aclosing(self._engine.generate(request, ids, answer, name, alone=output.alone)) as stream:
            async for one in stream:
                for event in output.events(one, answer):
                    self._emit(event)

    def _check(self, request: EngineRequest) -> None:
        """Raises IsthmusError when the request can not be taken."""
        if self._limits is None:
            raise InternalError("a request before the engine has started")
        self._limits.check(request)
        if self._load.waiting_requests >= self._config.engine.max_waiting:
            raise Overloaded("the queue of the engine", self._config.engine.max_waiting)

    # --- to the hub

    def _emit(self, message: Any) -> None:
        """Everything of one turn of the loop leaves as one frame."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        messages, self._pending = self._pending, []
        try:
            self._frames.send(events_to_bytes(messages))
        except ConnectionError:
            logger.info("the hub is gone")

    def note_load(self, running: int, waiting: int, usage: float) -> None:
        """What vLLM counted in a step; `usage` of its KV blocks in [0, 1]."""
        total = self._load.total_blocks
        self._load = replace(
            self._load, running_requests=running, waiting_requests=waiting, used_blocks=round(usage * total)
        )

    async def _tell_load(self, engine: Vllm) -> None:
        while True:
            await asyncio.sleep(_LOAD_S)
            await engine.check()
            if self._load != self._told:
                self._told = self._load
                self._emit(self._load)


async def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def serve(config: IsthmusConfig, identity: ModelIdentity, fd: int) -> None:
    """Until the hub says stop or is gone."""
    frames = await AsyncFrameSocket.open(socket.socket(fileno=fd))
    await Front(config, identity, frames).run()
